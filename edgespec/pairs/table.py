"""TOML tables into frozen dataclasses, and back: every key known, of its type, and within what it may be."""

from __future__ import annotations

import collections.abc as abc
import dataclasses
import difflib
import re
from datetime import date
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any, TypeVar

from edgespec.errors import ModelFormatError

CONTEXT = {"context": True}  # marks a field that says where a table was read, and is no key of it
NEVER = "never"
_T = TypeVar("_T")
_KINDS: dict[str, type] = {"str": str, "int": int}
_LIST_OF_NAMES = "tuple[str, ...]"


def keys(kind: type) -> list[str]:
    """The keys of a table that becomes a ``kind``."""
    return [field.name for field in _key_fields(kind)]


def read_table(kind: type[_T], content: Any, where: str, **context: Any) -> _T:
    """Raises ModelFormatError naming ``where`` and the key. ``context`` fills the fields that are no keys."""
    got = content if isinstance(content, dict) else {}
    known = {field.name: field for field in _key_fields(kind)}
    check_known(got, list(known), where)
    for name, field in known.items():
        if name in got:
            _check(where, name, got[name], str(field.type))
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ModelFormatError(f"{where}: {name} is missing; add it (models/README.md explains the keys)")
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in got.items()}
    places = {field.name for field in dataclasses.fields(kind) if field.name not in known}  # type: ignore[arg-type]
    return kind(**values, **{name: value for name, value in context.items() if name in places})


def check_known(got: abc.Iterable[str], known: list[str], where: str) -> None:
    for key in sorted(set(got) - set(known)):
        near = difflib.get_close_matches(key, sorted(known), n=1)
        raise ModelFormatError(f"{where}: unknown key {key!r}; allowed: {', '.join(near or sorted(known))}")


def short_dict(table: Any) -> dict[str, Any]:
    """``as_dict`` without what is at its default or empty: what a manifest holds."""
    values = {field.name: (getattr(table, field.name), field.default) for field in _key_fields(type(table))}
    return {name: _plain(value, short_dict) for name, (value, default) in values.items() if value not in (default, ())}


def as_dict(table: Any) -> dict[str, Any]:
    """The table's keys, those of tables inside it too, as JSON has them; those that were left out at their default."""
    return {field.name: _plain(getattr(table, field.name), as_dict) for field in _key_fields(type(table))}


def _plain(value: Any, as_table: abc.Callable[[Any], dict[str, Any]]) -> Any:
    if isinstance(value, tuple):
        return [_plain(item, as_table) for item in value]
    return as_table(value) if dataclasses.is_dataclass(value) else value


def _key_fields(kind: type) -> list[dataclasses.Field[Any]]:
    return [field for field in dataclasses.fields(kind) if not field.metadata.get("context")]


def _check(where: str, name: str, value: Any, kind: str) -> None:
    wanted = _KINDS.get(kind)
    is_names = isinstance(value, list) and all(type(item) is str for item in value)
    if (wanted and type(value) is not wanted) or (kind == _LIST_OF_NAMES and not is_names):
        expected = "a list of strings" if kind == _LIST_OF_NAMES else f"a value of type {kind}"
        raise ModelFormatError(f"{where}: {name} is {_short(value)}; allowed: {expected}")
    if name in _ALLOWED and not _ALLOWED[name][0](value):
        raise ModelFormatError(f"{where}: {name} is {_short(value)}; allowed: {_ALLOWED[name][1]}")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"


def _stays_inside(path: str) -> bool:
    """Below the folder it is relative to, on any platform."""
    parts = (*PurePosixPath(path).parts, *PureWindowsPath(path).parts)
    leaves = ".." in parts or PurePosixPath(path).is_absolute() or bool(PureWindowsPath(path).anchor)
    return bool(parts) and not leaves and "\\" not in path and path.isprintable()


def _is_date(text: str) -> bool:
    try:
        return date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False


def _matches(pattern: str) -> abc.Callable[[str], bool]:
    return lambda text: re.fullmatch(pattern, text, re.ASCII) is not None


_INSIDE = (_stays_inside, "a path inside the folder, relative, with /")
_ALLOWED: dict[str, tuple[abc.Callable[[Any], bool], str]] = {
    "name": (_matches(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}"), "letters, digits, '.', '_' and '-'"),
    "package": (_matches(r"[A-Za-z_][A-Za-z0-9_]*"), "the name of a Python package"),
    "hub": (_matches(r"(?!.*(--|\.\.|\.git$))[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*"), "owner/name of a repository"),
    "revision": (_matches(r"[\w./-]{1,100}"), "a branch, tag or commit"),
    "file": _INSIDE,
    "path": _INSIDE,
    "size_bytes": (lambda value: value > 0, "a size of 1 or more"),
    "sha256": (_matches(r"[0-9a-f]{64}"), "64 hexadecimal digits, in lower case"),
    "bits": (lambda value: value in (4, 8, 32), "4, 8 or 32"),
    "block_size": (lambda value: value in (16, 32, 64, 128), "16, 32, 64 or 128"),
    "pulled": (lambda value: value == NEVER or _is_date(value), f"{NEVER!r} or a date like '2025-12-31'"),
}
