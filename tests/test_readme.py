"""The README's two commands, and that the build server runs the second as it stands."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

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
