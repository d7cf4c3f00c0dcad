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


FOLDERS = {
    "EDGESPEC_CACHE_DIR": (paths.cache_dir, "XDG_CACHE_HOME"),
    "EDGESPEC_CONFIG_DIR": (paths.config_dir, "XDG_CONFIG_HOME"),
    "EDGESPEC_DATA_DIR": (paths.user_data_dir, "XDG_DATA_HOME"),
}


@pytest.mark.parametrize("variable", FOLDERS)
def test_the_users_folders_are_where_the_variables_say(
    variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = FOLDERS[variable]
    monkeypatch.setenv(variable, str(tmp_path / "mine"))
    assert folder() == tmp_path / "mine"
    assert not folder().exists()
    monkeypatch.setenv(variable, "~/mine")
    assert folder() == Path.home() / "mine"


@pytest.mark.parametrize("value", [None, ""])
@pytest.mark.parametrize("variable", FOLDERS)
def test_without_the_variables_they_are_the_platforms(
    variable: str, value: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, platforms = FOLDERS[variable]
    if value is None:
        monkeypatch.delenv(variable, raising=False)
    else:
        monkeypatch.setenv(variable, value)
    monkeypatch.setenv(platforms, str(tmp_path))
    assert folder().is_absolute()
    assert "edgespec" in folder().parts
    if sys.platform == "linux":
        assert folder() == tmp_path / "edgespec"
