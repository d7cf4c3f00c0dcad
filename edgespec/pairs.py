"""Pairs: which verifier and which draft model belong together, one TOML manifest each in ``models/``."""

from __future__ import annotations

import collections.abc as abc
import difflib
import hashlib
import importlib.util
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from edgespec.drafters.onnx_manifest import MANIFEST
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

    def check(self, path: Path) -> None:
        """Raise ModelFormatError unless the file is the very one the manifest describes (reads all of it)."""
        with path.open("rb") as file:
            digest = hashlib.sha256()
            while block := file.read(1 << 20):
                digest.update(block)
        if digest.hexdigest() != self.sha256:
            raise ModelFormatError(
                f"{path} is not the file of this pair: its SHA-256 begins {digest.hexdigest()[:12]}, "
                f"{self.sha256[:12]} expected; install it again with: {self.install} --force-reinstall"
            )


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

            source = self.verifier.find()
            self.verifier.check(source)
            try:
                quantize.build_draft(
                    source,
                    self.draft_path,
                    bits=self.draft.bits,
                    block_size=self.draft.block_size,
                    progress=progress,
                )
            except FileAccessError as error:
                if not self._draft_is_there():  # otherwise another process was faster
                    raise FileAccessError(
                        f"the draft model cannot be put into {self.draft_path}: {error}; make room there, or set "
                        "EDGESPEC_CACHE_DIR to another folder"
                    ) from error
        return self.draft_path

    def _draft_is_there(self) -> bool:
        manifest = self.draft_path / MANIFEST
        try:
            return manifest.is_file()
        except OSError as error:
            raise FileAccessError(
                f"cannot look for {manifest}: {error.strerror or error}; set EDGESPEC_CACHE_DIR to a folder of yours"
            ) from None


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
    except OSError as error:
        raise FileAccessError(f"cannot read {path}: {error.strerror or error}; check its permissions") from None
    except ValueError as error:  # TOMLDecodeError, UnicodeDecodeError
        raise ModelFormatError(f"{path} is not valid TOML: {error}; install edgespec again") from None
    if content.pop("format", None) != FORMAT:
        raise ModelFormatError(f"{path}: format is not {FORMAT}; install a matching edgespec")
    content["verifier"] = _table(VerifierSource, content.get("verifier"), f"{path} [verifier]")
    content["draft"] = _table(DraftSource, content.get("draft"), f"{path} [draft]")
    if content["draft"].build_from != "verifier":
        raise ModelFormatError(f"{path} [draft]: build_from is {content['draft'].build_from!r}; allowed: 'verifier'")
    return _table(Pair, content, str(path))


def _table(kind: type[_T], content: Any, where: str) -> _T:
    """A frozen dataclass from a TOML table; every key must be there with its type, and none besides."""
    kinds = {field.name: field.type for field in fields(kind)}  # type: ignore[arg-type]
    got = content if isinstance(content, dict) else {}
    for key in sorted(set(got) - set(kinds)):
        near = difflib.get_close_matches(key, sorted(kinds), n=1)
        raise ModelFormatError(f"{where}: unknown key {key!r}; allowed: {', '.join(near or sorted(kinds))}")
    for key, name in kinds.items():
        if key not in got:
            raise ModelFormatError(f"{where}: {key} is missing; add it (models/README.md explains the keys)")
        wanted = {"str": str, "int": int}.get(str(name))
        if wanted and type(got[key]) is not wanted:
            raise ModelFormatError(f"{where}: {key} is {got[key]!r}; allowed: a value of type {name}")
    return kind(**got)
