"""Where things lie."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from edgespec import paths

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("name", ["models", "device_profiles"])
def test_a_checkout_has_its_data_beside_the_package(name: str) -> None:
    assert paths.data_dir(name) == ROOT / name
    assert (paths.data_dir(name) / "README.md").is_file()


def test_an_installation_has_its_data_inside_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "_PACKAGE", tmp_path / "edgespec")
    inside = tmp_path / "edgespec" / "_data" / "models"
    assert paths.data_dir("models") == tmp_path / "models"
    inside.mkdir(parents=True)
    assert paths.data_dir("models") == inside


def test_the_cache_is_where_the_variable_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGESPEC_CACHE_DIR", str(tmp_path / "mine"))
    assert paths.cache_dir() == tmp_path / "mine"
    assert not paths.cache_dir().exists()


@pytest.mark.parametrize("value", [None, ""])
def test_without_the_variable_the_cache_is_the_platforms(
    value: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if value is None:
        monkeypatch.delenv("EDGESPEC_CACHE_DIR")
    else:
        monkeypatch.setenv("EDGESPEC_CACHE_DIR", value)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert paths.cache_dir().is_absolute()
    assert "edgespec" in paths.cache_dir().parts
    if sys.platform == "linux":
        assert paths.cache_dir() == tmp_path / "edgespec"
