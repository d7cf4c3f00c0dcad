"""Which pairs there are: the well-known ones that ship, and the user's own."""

from __future__ import annotations

import difflib
from contextlib import suppress
from pathlib import Path

from edgespec.errors import EdgespecError, UnknownPairError
from edgespec.pairs.pair import MANIFEST, Pair, read_pair
from edgespec.pairs.sources import BuiltDraft
from edgespec.paths import data_dir, pairs_dir


def load_pair(name_or_path: str) -> Pair:
    """Read a pair's manifest: of a pair folder or a .toml file, else of that name among the user's own, else shipped.

    Raises UnknownPairError, FileAccessError, or ModelFormatError for a manifest that is not right.
    """
    return _load(name_or_path, manifests())


def load_recipe(name_or_path: str) -> Pair:
    """As ``load_pair``, but of a name always what ships: it says where to pull from, and the user's own does not."""
    return _load(name_or_path, _shipped())


def _load(name_or_path: str, found: dict[str, Path]) -> Pair:
    path = _as_path(name_or_path) or found.get(name_or_path)
    if path is not None:
        return read_pair(path, name_or_path)
    near = difflib.get_close_matches(name_or_path, found, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise UnknownPairError(f"unknown pair {name_or_path!r}; known pairs: {', '.join(sorted(found)) or 'none'}{hint}")


def pair_names() -> list[str]:
    return sorted(manifests())


def manifests() -> dict[str, Path]:
    """Every pair's manifest by the name it is asked for with; the user's own hide shipped ones."""
    return _shipped() | {path.parent.name: path for path in pairs_dir().glob(f"*/{MANIFEST}") if _is_shown(path)}


def _shipped() -> dict[str, Path]:
    return {path.stem: path for path in data_dir("models").glob("*.toml")}


def what_is_missing(pair: Pair) -> str:
    """Why the pair cannot be loaded now, and what to do; "" when it can. A draft may still have to be built."""
    try:
        pair.verifier.find()
        if not isinstance(pair.draft, BuiltDraft):
            pair.draft.find()
    except EdgespecError as error:
        return str(error)
    return ""


def _is_shown(manifest: Path) -> bool:
    """Folders that are being made have a name that begins with a dot."""
    return not manifest.parent.name.startswith(".")


def _as_path(text: str) -> Path | None:
    """The manifest that ``text`` leads to, None if it is a name. Raises UnknownPairError for a path to none."""
    path = Path(text)
    with suppress(OSError):  # what cannot be looked at may still be a name
        manifest = path / MANIFEST if path.is_dir() else path
        if text and manifest.suffix == ".toml" and manifest.is_file():
            return manifest
    if "/" in text or path.name != text or path.suffix == ".toml":
        raise UnknownPairError(
            f"no pair at {text!r}: give a folder with a {MANIFEST}, a .toml file, or a name of `edgespec models list`"
        )
    return None
