"""A pair, and its manifest: ``pair.toml`` in a folder of its own, or one of the well-known ones in ``models/``."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import tomli_w

from edgespec.drafters.onnx_manifest import MANIFEST as DRAFT_MANIFEST
from edgespec.errors import FileAccessError, ModelFormatError
from edgespec.pairs import table
from edgespec.pairs.sources import (
    BuiltDraft,
    Draft,
    FileDraft,
    FileVerifier,
    HubDraft,
    HubVerifier,
    PackageVerifier,
    Part,
    Progress,
    Verifier,
    check_sha256,
    unreadable,
)
from edgespec.paths import cache_dir, pairs_dir

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FORMAT = 1
MAX_FILE_BYTES = 2**20  # a manifest has some hundred; more is another kind of file
MANIFEST = "pair.toml"


@dataclass(frozen=True, slots=True)
class Pair:
    """What models/README.md explains key by key. ``manifest`` is the file it was read from."""

    name: str
    description: str
    license: str
    verifier: Verifier
    draft: Draft
    profile: str = ""
    profiles: tuple[str, ...] = ()
    pulled: str = ""
    manifest: Path = field(default=Path(), metadata=table.CONTEXT)

    @property
    def draft_path(self) -> Path:
        """Where the draft lies, or will lie."""
        if isinstance(self.draft, FileDraft):
            return self.draft.folder / self.draft.path
        if isinstance(self.draft, HubDraft) or isinstance(self.verifier, HubVerifier):
            return pairs_dir() / self.name / "draft"
        recipe = f"int{self.draft.bits}-b{self.draft.block_size}"
        return cache_dir() / "drafts" / f"{self.name}-{self.verifier.sha256[:12]}-{recipe}"

    @property
    def draft_remedy(self) -> str:
        """What to do about a draft that does not load."""
        if isinstance(self.draft, FileDraft):
            return self.draft.remedy
        return f"delete {self.draft_path} to have it built anew"

    def ensure_draft(self, progress: Progress | None = None) -> Path:
        """The draft's folder; one that is built from the verifier is built now if it is not there (tens of seconds).

        It then appears whole or not at all. Raises ModelNotFoundError or ModelFormatError for a pair that is not pulled
        or not whole, MissingDependencyError without the extra ``quantize``, FileAccessError when the cache is not
        writable.
        """
        if isinstance(self.draft, BuiltDraft):
            if not self.has_draft:
                self._build(self.draft, progress)
            return self.draft_path
        return self.draft.find()

    def _build(self, draft: BuiltDraft, progress: Progress | None) -> None:
        source = self.verifier.find()
        self.verifier.check(source)
        import quantize

        try:
            quantize.build_draft(
                source, self.draft_path, bits=draft.bits, block_size=draft.block_size, progress=progress
            )
        except FileAccessError as error:
            if not self.has_draft:  # otherwise another process was faster
                raise FileAccessError(
                    f"the draft model cannot be put into {self.draft_path}: {error}; make room there, or set "
                    "EDGESPEC_CACHE_DIR to another folder"
                ) from error

    @property
    def has_draft(self) -> bool:
        """Whether a draft that is built on first use has been built. Raises FileAccessError."""
        manifest = self.draft_path / DRAFT_MANIFEST
        try:
            return manifest.is_file()
        except OSError as error:
            raise FileAccessError(
                f"cannot look for {manifest}: {error.strerror or error}; set EDGESPEC_CACHE_DIR to a folder of yours"
            ) from None


def read_pair(path: Path, name: str) -> Pair:
    """Read a manifest; ``name`` is what the user calls the pair, for messages.

    Raises FileAccessError, or ModelFormatError with the file, the key and what is allowed.
    """
    content = read_toml(path)
    if content.pop("format", None) != FORMAT:
        raise ModelFormatError(f"{path}: format is not {FORMAT}; install a matching edgespec")
    pulled = content.get("pulled") not in (None, table.NEVER)
    remedy = f"get it with: edgespec models pull {content.get('name')} --force" if pulled else "make the pair again"
    context = {"folder": path.parent, "pair": name, "remedy": remedy, "manifest": path}
    content["verifier"] = _verifier(content.get("verifier"), f"{path} [verifier]", context)
    content["draft"] = _draft(content.get("draft"), f"{path} [draft]", context)
    pair = table.read_table(Pair, content, str(path), **context)
    _check_together(pair)
    return pair


def read_toml(path: Path) -> dict[str, Any]:
    """Raises FileAccessError or ModelFormatError."""
    try:
        if path.exists() and not path.is_file():  # to open a pipe would wait for its other end
            raise ModelFormatError(f"{path} is not a regular file; get the pair again")
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise unreadable(path, error) from None
    if len(data) > MAX_FILE_BYTES:
        raise ModelFormatError(f"{path} is larger than {MAX_FILE_BYTES} bytes: no manifest; get the pair again")
    try:
        return tomllib.loads(data.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:  # TOMLDecodeError, UnicodeDecodeError
        raise ModelFormatError(f"{path} is not valid TOML: {error}; correct it, or get the pair again") from None


def check_draft_files(folder: Path, remedy: str, progress: Progress | None = None) -> None:
    """Compare what lies in a draft folder with the SHA-256 noted when it was built; nothing is noted of an export.

    Reads all of it. Raises ModelFormatError, ModelNotFoundError or FileAccessError.
    """
    manifest = folder / DRAFT_MANIFEST
    noted = read_toml(manifest).get("sha256", {}) if manifest.is_file() else {}
    if not isinstance(noted, dict):
        raise ModelFormatError(f"{manifest}: sha256 is {noted!r}; allowed: a table; {remedy}")
    for name, sha256 in noted.items():
        check_sha256(folder / name, str(sha256), remedy, progress)


def _verifier(content: Any, where: str, context: dict[str, Any]) -> Verifier:
    kinds = {"package": PackageVerifier, "hub": HubVerifier, "path": FileVerifier}
    kind = kinds[_which(content, list(kinds), where)]
    if kind is FileVerifier and "parts" in content:
        content = content | {"parts": _parts(content["parts"], where)}
    verifier: Verifier = table.read_table(kind, content, where, **context)
    return verifier


def _parts(content: Any, where: str) -> list[Part]:
    if not isinstance(content, list):
        raise ModelFormatError(f"{where}: parts is {content!r}; allowed: a list of tables, [[verifier.parts]]")
    return [table.read_table(Part, part, f"{where} part {i + 2}") for i, part in enumerate(content)]


def _draft(content: Any, where: str, context: dict[str, Any]) -> Draft:
    if _which(content, ["build_from", "path"], where) == "path":
        return table.read_table(FileDraft, content, where, **context)
    kinds: dict[Any, type[BuiltDraft | HubDraft]] = {"verifier": BuiltDraft, "hub": HubDraft}
    chosen = content["build_from"]
    if not isinstance(chosen, str) or chosen not in kinds:
        raise ModelFormatError(f"{where}: build_from is {chosen!r}; allowed: 'verifier', 'hub'")
    draft: Draft = table.read_table(kinds[chosen], content, where, **context)
    return draft


def _which(content: Any, kinds: list[str], where: str) -> str:
    """The one key that tells what kind of table it is."""
    if not isinstance(content, dict):
        raise ModelFormatError(f"{where} is missing; add it (models/README.md explains the keys)")
    found = [key for key in kinds if key in content]
    if len(found) != 1:
        raise ModelFormatError(f"{where}: got {', '.join(content) or 'no key'}; allowed: one of {', '.join(kinds)}")
    return found[0]


def _check_together(pair: Pair) -> None:
    """A verifier that is to be pulled brings its draft along, and no other can; a split GGUF lies in one folder."""
    if isinstance(pair.verifier, HubVerifier) and isinstance(pair.draft, FileDraft):
        raise ModelFormatError(f"{pair.manifest} [draft]: path does not go with a verifier on the hub; use build_from")
    if isinstance(pair.draft, HubDraft) and not isinstance(pair.verifier, HubVerifier):
        raise ModelFormatError(f"{pair.manifest} [draft]: hub goes with a verifier on the hub only; use path")
    if isinstance(pair.verifier, FileVerifier):
        folders = {PurePosixPath(part.path).parent for part in pair.verifier.files}
        if len(folders) > 1:
            raise ModelFormatError(f"{pair.manifest} [verifier]: parts are in several folders; put them into one")


def render(pair: Pair) -> str:
    """The manifest's text, which ``read_pair`` reads again."""
    return tomli_w.dumps({"format": FORMAT, **table.short_dict(pair)})
