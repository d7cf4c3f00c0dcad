"""A well-known pair comes from the hub: its GGUFs downloaded, the draft model built, the whole put into a folder."""

from __future__ import annotations

import collections.abc as abc
import contextlib
import os
import shutil
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path

from edgespec import hub
from edgespec.drafters.onnx_manifest import MANIFEST as DRAFT_MANIFEST
from edgespec.errors import FileAccessError, ModelFormatError, UnknownPairError
from edgespec.pairs.pair import MANIFEST, Pair, render
from edgespec.pairs.sources import (
    FileDraft,
    FileVerifier,
    HubDraft,
    HubVerifier,
    PackageVerifier,
    Part,
    Progress,
    file_sha256,
)
from edgespec.paths import pairs_dir, user_data_dir

DRAFT = "draft"
_BUILD_SHARE = 0.1  # of the whole, as the progress bar sees it
Check = abc.Callable[[Path, Path], object]


def pull(pair: Pair, check: Check, *, force: bool = False, progress: Progress | None = None) -> Path:
    """Make the pair folder ``data folder/pairs/NAME`` of a pair on the hub, and return it.

    check     called with the draft folder and the verifier's GGUF before the pair is recorded; raises where they do not
              fit each other
    force     replace the pair that is there
    progress  called with (stage, finished fraction of the whole)

    The folder appears whole or not at all. What was downloaded and built before a break, a kill or Ctrl-C is kept in
    ``data folder/downloads/NAME`` and taken up by the next call. Raises UnknownPairError for a pair that is not on the
    hub, FileAccessError when the pair is there already, the disk is too small, or another process is pulling it,
    DownloadError, MissingDependencyError, and what building a draft and ``check`` raise.
    """
    if not isinstance(pair.verifier, HubVerifier):
        got = f"; {pair.verifier.install} brings its verifier" if isinstance(pair.verifier, PackageVerifier) else ""
        raise UnknownPairError(f"the pair {pair.name} does not come from the hub{got}")
    out = pairs_dir() / pair.name
    _check_replaceable(out, force)
    staging = user_data_dir() / "downloads" / pair.name
    with hub.only_one(staging.with_name(f"{pair.name}.lock")):
        work = _Work.plan(pair, pair.verifier, staging, progress or (lambda stage, fraction: None))
        made = work.fetch()
        check(made.draft, made.verifier.find())
        _publish(pair, made, out, force)
        shutil.rmtree(staging, ignore_errors=True)
    return out


def _check_replaceable(out: Path, force: bool) -> None:
    """Before gigabytes come, what new_folder would say after them."""
    if out.exists() and not (out / MANIFEST).is_file():
        raise FileAccessError(f"{out} exists and has no {MANIFEST}, so it is not replaced; move it away")
    if out.exists() and not force:
        raise FileAccessError(f"{out} exists; pull with --force to replace it")


@dataclass(frozen=True)
class _Made:
    """What lies in the staging folder when all is there."""

    verifier: FileVerifier
    draft: Path
    draft_origin: str


@dataclass(frozen=True)
class _Work:
    """What is to be fetched. ``draft_files`` is the verifier's own GGUF where the draft is built from that."""

    verifier_files: tuple[hub.HubFile, ...]
    draft_files: tuple[hub.HubFile, ...]
    bits: int
    block_size: int
    staging: Path
    progress: Progress

    @classmethod
    def plan(cls, pair: Pair, verifier: HubVerifier, staging: Path, progress: Progress) -> _Work:
        """Ask the hub for both sides, and everything that can go wrong before gigabytes are fetched."""
        draft = pair.draft
        if isinstance(draft, FileDraft):
            raise UnknownPairError(f"the pair {pair.name} brings its draft itself: there is nothing to pull")
        progress("asking the hub", 0.0)
        files = hub.find(verifier.hub, verifier.file, verifier.revision)
        source = hub.find(draft.hub, draft.file, draft.revision) if isinstance(draft, HubDraft) else files
        if len(source) > 1:
            raise ModelFormatError(f"{source[0].repository}: a draft is built from one GGUF, not from {len(source)}")
        work = cls(files, source, draft.bits, draft.block_size, staging, progress)
        for file in work._files:
            hub.check_access(file)
        hub.check_space(staging, work._num_bytes_to_come())
        return work

    @property
    def _files(self) -> list[hub.HubFile]:
        """Each once, the draft's first: it is small, and what is wrong with it shows early."""
        return list(dict.fromkeys((*self.draft_files, *self.verifier_files)))

    def _num_bytes_to_come(self) -> int:
        """A built draft is about as large as its source, at most."""
        return sum(hub.num_missing(file, self._folder(file)) for file in self._files) + self.draft_files[0].size_bytes

    def _folder(self, file: hub.HubFile) -> Path:
        return self.staging / file.commit / file.repository.replace("/", "--")

    def fetch(self) -> _Made:
        source = self._download(self.draft_files[0])
        draft = self._build(source)
        first, *more = (self._part(file) for file in self.verifier_files)
        origin, folder = _origin(self.verifier_files[0]), self._folder(self.verifier_files[0])
        verifier = FileVerifier(first.path, first.size_bytes, first.sha256, tuple(more), origin, folder)
        return _Made(verifier, draft, _origin(self.draft_files[0]))

    def _part(self, file: hub.HubFile) -> Part:
        path = self._download(file)
        return Part(path.name, file.size_bytes, file.sha256 or file_sha256(path))

    def _download(self, file: hub.HubFile) -> Path:
        total = sum(other.size_bytes for other in self._files)
        before = sum(other.size_bytes for other in self._files[: self._files.index(file)])

        def report(num_bytes: int) -> None:
            built = _BUILD_SHARE if before else 0.0  # what follows the first file follows the building, too
            self.progress(f"downloading {file.name}", built + (1 - _BUILD_SHARE) * (before + num_bytes) / total)

        return hub.download(file, self._folder(file), report)

    def _build(self, source: Path) -> Path:
        """The draft folder, kept for the next call if this one does not come to its end."""
        import quantize

        out = source.with_name(f"{source.stem}-int{self.bits}-b{self.block_size}")
        if not (out / DRAFT_MANIFEST).is_file():
            done = (1 - _BUILD_SHARE) * self.draft_files[0].size_bytes / sum(file.size_bytes for file in self._files)

            def report(stage: str, fraction: float) -> None:
                self.progress(f"building the draft model: {stage}", done + _BUILD_SHARE * fraction)

            quantize.build_draft(source, out, bits=self.bits, block_size=self.block_size, progress=report)
        return out


def _origin(file: hub.HubFile) -> str:
    return f"{file.repository}@{file.commit}"


def _publish(pair: Pair, made: _Made, out: Path, force: bool) -> None:
    from quantize.folder import new_folder

    with new_folder(out, MANIFEST, force=force) as folder:
        for part in made.verifier.files:
            _link(made.verifier.folder / part.path, folder / part.path)
        made.draft.rename(folder / DRAFT)
        draft = FileDraft(DRAFT, file_sha256(folder / DRAFT / DRAFT_MANIFEST), made.draft_origin)
        recorded = replace(pair, verifier=made.verifier, draft=draft, pulled=date.today().isoformat())
        (folder / MANIFEST).write_text(render(recorded), encoding="utf-8")


def _link(source: Path, target: Path) -> None:
    """One file under both names until all is published, so that nothing has to be fetched twice."""
    with contextlib.suppress(OSError, NotImplementedError):
        os.link(source, target)
        return
    source.rename(target)  # a file system without links
