"""Where things lie: the data folders that come with edgespec, the user's cache and the user's settings."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs

_PACKAGE = Path(__file__).resolve().parent


def data_dir(name: str) -> Path:
    """The folder ``models`` or ``device_profiles``: inside an installed package, beside it in a checkout."""
    installed = _PACKAGE / "_data" / name
    return installed if installed.is_dir() else _PACKAGE.parent / name


def cache_dir() -> Path:
    """The user's cache folder for edgespec (not created here); EDGESPEC_CACHE_DIR overrides the platform's place."""
    return _chosen("EDGESPEC_CACHE_DIR") or Path(platformdirs.user_cache_dir("edgespec", appauthor=False))


def user_data_dir() -> Path:
    """The user's data folder for edgespec (not created here); EDGESPEC_DATA_DIR overrides the platform's place."""
    return _chosen("EDGESPEC_DATA_DIR") or Path(platformdirs.user_data_dir("edgespec", appauthor=False))


def pairs_dir() -> Path:
    """Where the user's own pairs lie, a folder each, those that were pulled among them."""
    return user_data_dir() / "pairs"


def config_dir() -> Path:
    """The user's configuration folder for edgespec (not created here); EDGESPEC_CONFIG_DIR overrides the platform's."""
    return _chosen("EDGESPEC_CONFIG_DIR") or Path(platformdirs.user_config_dir("edgespec", appauthor=False))


def _chosen(variable: str) -> Path | None:
    """``~`` is the home folder, as a shell would have it outside quotes."""
    value = os.environ.get(variable)
    return Path(os.path.expanduser(value)) if value else None  # noqa: PTH111 (Path.expanduser raises without a home)
