"""The two sides of a pair: where its verifier is found, and where its draft model comes from."""

from __future__ import annotations

import collections.abc as abc
import hashlib
import importlib.util
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from edgespec.drafters.onnx_manifest import MANIFEST
from edgespec.errors import FileAccessError, ModelFormatError, ModelNotFoundError
from edgespec.pairs.table import CONTEXT

Progress = abc.Callable[[str, float], None]


@dataclass(frozen=True, slots=True)
class PackageVerifier:
    """A GGUF inside an installed Python package. ``install`` is the command that brings it."""

    package: str
    file: str
    size_bytes: int
    sha256: str
    install: str

    def find(self) -> Path:
        """The GGUF's path; ModelNotFoundError says how to get it when it is not there."""
        folder = _package_folder(self.package)
        path = folder / self.file if folder else None
        if path is None or not _is_file(path):
            raise ModelNotFoundError(
                f"the verifier {self.file} is not installed (looked for the Python package {self.package}); "
                f"get it with: {self.install}"
            )
        check_size(path, self.size_bytes, self._remedy)
        return path

    def check(self, path: Path, progress: Progress | None = None) -> None:
        """Raise ModelFormatError unless the file is the very one the manifest describes (reads all of it)."""
        check_sha256(path, self.sha256, self._remedy, progress)

    @property
    def _remedy(self) -> str:
        return f"install it again with: {self.install} --force-reinstall"


@dataclass(frozen=True, slots=True)
class Part:
    """A further file of a split GGUF."""

    path: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class FileVerifier:
    """A GGUF beside the manifest; of a split one its first file, with the others in ``parts``.

    origin  where it was got: owner/name@commit, for people
    folder  the manifest's
    """

    path: str
    size_bytes: int
    sha256: str
    parts: tuple[Part, ...] = ()
    origin: str = ""
    folder: Path = field(default=Path(), metadata=CONTEXT)
    remedy: str = field(default="make the pair again", metadata=CONTEXT)

    def find(self) -> Path:
        """The (first) GGUF's path. Raises ModelNotFoundError, or ModelFormatError for another size."""
        for part in self.files:
            path = self.folder / part.path
            if not _is_file(path):
                raise ModelNotFoundError(f"the pair's verifier {path} is missing; {self.remedy}")
            check_size(path, part.size_bytes, self.remedy)
        return self.folder / self.path

    def check(self, path: Path, progress: Progress | None = None) -> None:
        """Raise ModelFormatError unless ``path`` (what ``find`` gave) and all other parts are the very files."""
        for part in self.files:
            check_sha256(path.parent / Path(part.path).name, part.sha256, self.remedy, progress)

    @property
    def files(self) -> tuple[Part, ...]:
        """All of them, the first one first."""
        return (Part(self.path, self.size_bytes, self.sha256), *self.parts)


@dataclass(frozen=True, slots=True)
class HubVerifier:
    """A GGUF on the hub, not downloaded yet. ``file`` is a name or a pattern that one model's files match."""

    hub: str
    file: str
    revision: str = "main"
    pair: str = field(default="", metadata=CONTEXT)

    def find(self) -> Path:
        """Raises ModelNotFoundError, which says how to get it."""
        raise ModelNotFoundError(_not_pulled(self.pair, self.hub))

    def check(self, path: Path, progress: Progress | None = None) -> None:
        """Nothing is known of the file before it was pulled: raises ModelNotFoundError."""
        raise ModelNotFoundError(_not_pulled(self.pair, self.hub))


@dataclass(frozen=True, slots=True)
class BuiltDraft:
    """A draft model built on first use from the pair's own verifier, into the user's cache."""

    build_from: str
    bits: int
    block_size: int


@dataclass(frozen=True, slots=True)
class HubDraft:
    """A draft model to be built from a GGUF on the hub when the pair is pulled."""

    build_from: str
    hub: str
    file: str
    bits: int
    block_size: int
    revision: str = "main"
    pair: str = field(default="", metadata=CONTEXT)

    def find(self) -> Path:
        """Raises ModelNotFoundError, which says how to get it."""
        raise ModelNotFoundError(_not_pulled(self.pair, self.hub))


@dataclass(frozen=True, slots=True)
class FileDraft:
    """A draft folder beside the manifest. ``sha256`` is of its draft.toml."""

    path: str
    sha256: str
    origin: str = ""
    folder: Path = field(default=Path(), metadata=CONTEXT)
    remedy: str = field(default="make the pair again", metadata=CONTEXT)

    def find(self) -> Path:
        """The folder. Raises ModelNotFoundError, or ModelFormatError when its manifest is another."""
        manifest = self.folder / self.path / MANIFEST
        if not _is_file(manifest):
            raise ModelNotFoundError(f"the pair's draft model is missing (no {manifest}); {self.remedy}")
        check_sha256(manifest, self.sha256, self.remedy)
        return manifest.parent


Verifier: TypeAlias = PackageVerifier | FileVerifier | HubVerifier
Draft: TypeAlias = BuiltDraft | HubDraft | FileDraft


def _not_pulled(pair: str, repository: str) -> str:
    return (
        f"the pair {pair} is not downloaded yet (it comes from {repository}); get it with: edgespec models pull {pair}"
    )


def _package_folder(package: str) -> Path | None:
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):  # ValueError: a module that was not imported in the usual way
        return None
    return Path(spec.origin).parent if spec and spec.origin else None


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError as error:
        raise unreadable(path, error) from None


def unreadable(path: Path, error: OSError) -> FileAccessError:
    return FileAccessError(f"cannot read {path}: {error.strerror or error}; check its permissions")


def check_size(path: Path, size_bytes: int, remedy: str) -> None:
    got = path.stat().st_size
    if got != size_bytes:
        raise ModelFormatError(f"{path} has {got} bytes, {size_bytes} expected; {remedy}")


def check_sha256(path: Path, sha256: str, remedy: str, progress: Progress | None = None) -> None:
    got = file_sha256(path, progress)
    if got != sha256:
        raise ModelFormatError(
            f"{path} is not the file of this pair: its SHA-256 begins {got[:12]}, {sha256[:12]} expected; {remedy}"
        )


def file_sha256(path: Path, progress: Progress | None = None) -> str:
    """Reads the whole file, and tells ``progress`` on the way. Raises ModelNotFoundError or FileAccessError."""
    digest, num_bytes = hashlib.sha256(), 0
    try:
        size_bytes = path.stat().st_size
        with path.open("rb") as stream:
            while block := stream.read(1 << 22):
                digest.update(block)
                num_bytes += len(block)
                if progress:
                    progress(f"reading {path.name}", num_bytes / size_bytes)
    except FileNotFoundError:
        raise ModelNotFoundError(f"{path} is not there; get or make the pair again") from None
    except OSError as error:
        raise unreadable(path, error) from None
    return digest.hexdigest()
