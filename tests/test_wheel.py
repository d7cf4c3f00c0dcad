"""The wheel: all that an installation needs, and nothing of the tests."""

from __future__ import annotations

import configparser
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built without a network: hatchling comes with the development extra."""
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)], check=True, cwd=ROOT)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


@pytest.fixture(scope="module")
def unpacked(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What pip would put into site-packages."""
    folder = tmp_path_factory.mktemp("site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def run(unpacked: Path, *arguments: str) -> str:
    """Python's output, in a folder without a checkout, with the wheel before anything installed."""
    environment = os.environ | {"PYTHONPATH": str(unpacked), "PYTHONIOENCODING": "utf-8"}
    command = [sys.executable, *arguments]
    done = subprocess.run(
        command, capture_output=True, encoding="utf-8", check=True, cwd=unpacked.parent, env=environment
    )
    return done.stdout


@pytest.mark.parametrize(
    "name",
    [
        "edgespec/py.typed",
        "edgespec/verifiers/canary.gguf",
        "edgespec/_data/models/starter.toml",
        "edgespec/_data/models/README.md",
        "edgespec/_data/device_profiles/README.md",
        "quantize/__init__.py",
    ],
)
def test_what_is_needed_is_there(names: set[str], name: str) -> None:
    assert name in names


def test_every_module_is_there(names: set[str]) -> None:
    sources = {
        path.relative_to(ROOT).as_posix() for part in ("edgespec", "quantize") for path in ROOT.glob(f"{part}/**/*.py")
    }
    assert len(sources) > 30
    assert sources <= names


def test_the_licence_is_there(names: set[str]) -> None:
    assert any(".dist-info/" in name and name.endswith("/LICENSE") for name in names)


def test_nothing_else_is_there(names: set[str]) -> None:
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"edgespec", "quantize"}
    assert {name for name in names if "test" in name or "__pycache__" in name or name.endswith(".pyc")} == set()
    assert {name for name in names if name.endswith((".gguf", ".onnx", ".data"))} == {"edgespec/verifiers/canary.gguf"}


def test_the_command_is_an_entry_point(unpacked: Path) -> None:
    (path,) = unpacked.glob("*.dist-info/entry_points.txt")
    parser = configparser.ConfigParser()
    parser.read_string(path.read_text(encoding="utf-8"))
    assert dict(parser["console_scripts"]) == {"edgespec": "edgespec.cli.main:main"}
    assert "Commands" in run(unpacked, "-m", "edgespec", "--help")


def test_an_installation_finds_its_data(unpacked: Path) -> None:
    code = "from edgespec.pairs import load_pair; import edgespec; print(load_pair('starter').name, edgespec.__file__)"
    assert run(unpacked, "-c", code).split() == ["starter", str(unpacked / "edgespec" / "__init__.py")]
