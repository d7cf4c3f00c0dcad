"""Pairs: which verifier and which draft model belong together, one TOML manifest each in ``models/``."""

from __future__ import annotations

import collections.abc as abc
import difflib
import importlib.util
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from edgespec.errors import FileAccessError, ModelFormatError, ModelNotFoundError, UnknownPairError
from edgespec.paths import cache_dir, data_dir

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FORMAT = 1
DEFAULT_PAIR = "starter"
Progress = abc.Callable[[str, float], None]
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class VerifierSource:
    """A GGUF inside an installed Python package. ``install`` is the command that brings it."""

    package: str
    file: str
    size_bytes: int
    sha256: str
    install: str

    def find(self) -> Path:
        """The GGUF's path; ModelNotFoundError says how to get it when it is not there."""
        spec = importlib.util.find_spec(self.package)
        folder = Path(spec.origin).parent if spec and spec.origin else None
        path = folder / self.file if folder else None
        if path is None or not path.is_file():
            raise ModelNotFoundError(
                f"the verifier {self.file} is not installed (looked for the Python package {self.package}); "
                f"get it with: {self.install}"
            )
        if path.stat().st_size != self.size_bytes:
            raise ModelFormatError(
                f"{path} has {path.stat().st_size} bytes, {self.size_bytes} expected; "
                f"install it again with: {self.install} --force-reinstall"
            )
        return path


@dataclass(frozen=True, slots=True)
class DraftSource:
    """A draft model built on first use from the pair's own verifier, into the user's cache."""

    build_from: str
    bits: int
    block_size: int


@dataclass(frozen=True, slots=True)
class Pair:
    name: str
    description: str
    license: str
    verifier: VerifierSource
    draft: DraftSource

    @property
    def draft_path(self) -> Path:
        """Where the built draft lies, or will lie."""
        recipe = f"int{self.draft.bits}-b{self.draft.block_size}"
        return cache_dir() / "drafts" / f"{self.name}-{self.verifier.sha256[:12]}-{recipe}"

    def ensure_draft(self, progress: Progress | None = None) -> Path:
        """The draft's folder, built now if it is not there (tens of seconds). Appears whole or not at all.

        Raises MissingDependencyError without the extra ``quantize``, FileAccessError when the cache is not writable.
        """
        if not self._draft_is_there():
            import quantize

            try:
                quantize.build_draft(
                    self.verifier.find(),
                    self.draft_path,
                    bits=self.draft.bits,
                    block_size=self.draft.block_size,
                    progress=progress,
                )
            except FileAccessError:
                if not self._draft_is_there():  # otherwise another process was faster
                    raise
        return self.draft_path

    def _draft_is_there(self) -> bool:
        return (self.draft_path / "draft.toml").is_file()


def pair_names() -> list[str]:
    return sorted(path.stem for path in data_dir("models").glob("*.toml"))


def load_pair(name: str) -> Pair:
    """Read one pair's manifest. Raises UnknownPairError, or ModelFormatError for a manifest that is not right."""
    names = pair_names()
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UnknownPairError(f"unknown pair {name!r}; known pairs: {', '.join(names) or 'none'}{hint}")
    path = data_dir("models") / f"{name}.toml"
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ModelFormatError(f"{path} is not valid TOML: {error}; install edgespec again") from None
    if content.pop("format", None) != FORMAT:
        raise ModelFormatError(f"{path}: format is not {FORMAT}; install a matching edgespec")
    content["verifier"] = _table(VerifierSource, content.get("verifier"), f"{path} [verifier]")
    content["draft"] = _table(DraftSource, content.get("draft"), f"{path} [draft]")
    return _table(Pair, content, str(path))


def _table(kind: type[_T], content: Any, where: str) -> _T:
    """A frozen dataclass from a TOML table; every key must be there and none besides."""
    known = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    got = set(content) if isinstance(content, dict) else set()
    for key in sorted(got - known):
        near = difflib.get_close_matches(key, sorted(known), n=1)
        raise ModelFormatError(f"{where}: unknown key {key!r}; allowed: {', '.join(near or sorted(known))}")
    if got != known:
        raise ModelFormatError(f"{where}: missing {', '.join(sorted(known - got))}")
    return kind(**content)
