"""The README's two commands, that the build server runs the second as it stands, and every command the READMEs name."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import click
import pytest

from edgespec.cli.main import cli

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def block(name: str) -> re.Match[str]:
    """The one block of shell commands that follows the one marker of this name."""
    marker = f"<!-- {name} command -->"
    assert README.count(marker) == 1
    found = re.search(rf"^{marker}\n```bash\n(?P<body>.+?)\n```$", README, re.MULTILINE | re.DOTALL)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("name", "steps"),
    [
        ("run", ["pip install", "edgespec run"]),
        ("test", ["[dev]", "ruff check", "ruff format --check", "mypy", "pytest"]),
    ],
)
def test_each_command_stands_once_and_is_one_chain(name: str, steps: list[str]) -> None:
    body = block(name)["body"]
    assert [step for step in steps if step not in body] == []
    lines = body.splitlines()
    assert [line for line in lines[:-1] if not line.endswith(("&&", "\\"))] == []


@pytest.mark.skipif(os.name != "posix", reason=".ci/run is a bash script")
def test_the_build_server_runs_the_test_command(tmp_path: Path) -> None:
    shutil.copytree(ROOT / ".ci", tmp_path / ".ci")
    found = block("test")
    changed = f'{README[: found.start("body")]}echo first &&\n  echo "$PWD"{README[found.end("body") :]}'
    (tmp_path / "README.md").write_text(changed, encoding="utf-8")
    done = subprocess.run([tmp_path / ".ci" / "run"], capture_output=True, encoding="utf-8", cwd="/")
    assert (done.returncode, done.stdout.split()) == (0, ["first", str(tmp_path)]), done.stderr


@pytest.mark.skipif(os.name != "posix", reason=".ci/run is a bash script")
@pytest.mark.parametrize(("body", "code"), [("", 1), ("true && exit 3", 3), ("false && true", 1)])
def test_the_build_server_fails_with_its_command_or_without_one(tmp_path: Path, body: str, code: int) -> None:
    shutil.copytree(ROOT / ".ci", tmp_path / ".ci")
    text = f"# x\n<!-- test command -->\n```bash\n{body}\n```\nmore\n" if body else "# nothing\n"
    (tmp_path / "README.md").write_text(text, encoding="utf-8")
    assert subprocess.run([tmp_path / ".ci" / "run"], capture_output=True).returncode == code


FOLDERS = (".", "quantize", "models", "device_profiles")
COMMAND = re.compile(
    r"edgespec (run|calibrate|distill|doctor|worker|bench|(?:quantize|models|profiles) [a-z]+)([^`#\n]*)"
)
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*")
NOT_OURS = {"--check", "--no-cache-dir", "--no-deps"}  # of pip and ruff


def read(folder: str) -> str:
    return (ROOT / folder / "README.md").read_text(encoding="utf-8")


def options(command: str) -> set[str]:
    """Of a command by its name, such as "quantize draft"."""
    found: click.Command = cli
    for name in command.split():
        assert isinstance(found, click.Group)
        inner = found.get_command(click.Context(found), name)
        assert inner is not None, f"there is no command: edgespec {command}"
        found = inner
    return {option for parameter in found.params for option in parameter.opts}


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_commands_that_a_readme_names_exist_with_their_options(folder: str) -> None:
    named = COMMAND.findall(read(folder))
    assert named
    for command, rest in named:
        assert set(OPTION.findall(rest)) <= options(command), f"edgespec {command}{rest}"


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_options_that_a_readme_names_exist(folder: str) -> None:
    commands = {command for each in FOLDERS for command, _ in COMMAND.findall(read(each))}
    known = set().union(*map(options, commands))
    assert set(OPTION.findall(read(folder))) <= known | NOT_OURS
