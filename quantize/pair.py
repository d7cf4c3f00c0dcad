"""A verifier and a small sibling of it in, a pair's folder out: both fit each other and the device."""

from __future__ import annotations

import collections.abc as abc
import contextlib
import hashlib
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomli_w

from edgespec.devices.memory import MemoryPlan, plan_memory
from edgespec.devices.profile import Profile, as_toml
from edgespec.devices.sizes import Budget, ModelShape, Setup
from edgespec.errors import ModelFormatError, ParameterError, ProfileError
from quantize.draft import Progress
from quantize.folder import new_folder

if TYPE_CHECKING:
    from quantize.gguf_shape import GgufInfo
    from quantize.head import HeadChoice
    from quantize.source import Source

MANIFEST, PROFILE, VERIFIER, DRAFT = "pair.toml", "profile.toml", "verifier", "draft"
FORMAT = 1
# What is tried, the largest first, when a verifier does not fit. All work without an importance matrix.
SMALLER_TYPES = ("Q8_0", "Q6_K", "Q5_K_M", "Q4_K_M", "Q4_K_S", "Q3_K_M", "Q3_K_S", "Q2_K")

_SAME_SIZE = 1.02  # two files of one type differ by this much: llama.cpp's mixtures change from version to version

CheckTokens = abc.Callable[[abc.Sequence[str], abc.Sequence[str]], None]


@dataclass(frozen=True, slots=True)
class PairResult:
    """What ``build_pair`` made.

    kept  the verifier is a copy of its source, which had the type wanted or a smaller one
    head  how the draft's ids were chosen; None where it has all
    """

    path: Path
    verifier_type: str
    kept: bool
    verifier_bytes: int
    draft_bytes: int
    plan: MemoryPlan
    head: HeadChoice | None = None

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        verifier = {"type": self.verifier_type, "kept": self.kept, "size_bytes": self.verifier_bytes}
        draft: dict[str, Any] = {"size_bytes": self.draft_bytes}
        if self.head is not None:
            draft |= {"head_vocab": len(self.head.ids), "coverage": self.head.coverage}
        return {"path": str(self.path), "verifier": verifier, "draft": draft, "memory": self.plan.as_dict()}


@dataclass(frozen=True, slots=True)
class PairOptions:
    """How a pair is made.

    kind         GGUF type of the verifier; None: the profile's, or what the source has if it is quantized and no larger
    head_vocab   ids the draft may propose, 0 for all; None: the profile's
    corpus       text files to count ids on; none: text that the draft's source writes itself
    imatrix      importance matrix of the verifier
    requantize   accept a verifier that is quantized already and too large: that costs quality twice
    num_threads  None: the usable CPUs
    """

    kind: str | None = None
    head_vocab: int | None = None
    corpus: tuple[Path, ...] = ()
    imatrix: Path | None = None
    requantize: bool = False
    num_threads: int | None = None


def build_pair(
    verifier: Path,
    draft: Path,
    profile: Profile,
    out: Path,
    *,
    budget: Budget,
    check_tokens: CheckTokens,
    options: PairOptions = PairOptions(),
    force: bool = False,
    progress: Progress | None = None,
) -> PairResult:
    """Make a pair folder: the verifier as one GGUF (or the parts it came in), the draft's folder, the profile it was
    planned for, and a manifest.

    verifier      a GGUF; of a split one its first file
    draft         a GGUF or a checkpoint's folder, of the same vocabulary
    budget        memory the device has; see Budget.of
    check_tokens  raises VocabularyMismatchError unless the draft's tokens are the verifier's
    force         replace ``out`` if it is a pair folder; sources are never written
    progress      called on this thread with what is being done and the finished fraction, 0 to 1

    Vocabularies and memory are checked before any work. ``out`` appears whole or not at all. Raises MemoryBudgetError,
    VocabularyMismatchError, and what build_draft, choose_head and quantize_verifier raise.
    """
    report = progress or (lambda stage, fraction: None)
    report("reading", 0.0)
    job = _open(verifier, draft, profile, options)
    check_corpus(options.corpus, options.head_vocab, profile)
    check_tokens(job.source.tokens, job.info.tokens)
    job.check_memory(budget)
    with new_folder(out, MANIFEST, force=force, sources=job.sources) as folder:
        head = job.choose_head(within(report, 0.02, 0.2, "draft's head"))
        draft_shape = job.build_draft(folder / DRAFT, head, within(report, 0.2, 0.4, "draft"))
        files = job.write_verifier(folder, within(report, 0.4, 0.98, "verifier"))
        verifier_bytes = sum(file.size_bytes for file in files)
        plan = plan_memory(Setup.of(profile, job.shape(verifier_bytes), draft_shape, budget))
        plan.check()
        (folder / PROFILE).write_text(as_toml(profile), encoding="utf-8")
        (folder / MANIFEST).write_text(job.manifest(out, folder / DRAFT, files), encoding="utf-8")
    report("done", 1.0)
    return PairResult(out, job.kind, job.kept, verifier_bytes, draft_shape.weights_bytes, plan, head)


def within(report: Progress, start: float, stop: float, what: str) -> Progress:
    """The progress of a part of the work, which is called ``what``."""
    return lambda stage, fraction: report(f"{what}: {stage}", start + (stop - start) * min(max(fraction, 0.0), 1.0))


def _within_stage(report: Progress, stage: str, start: float, stop: float) -> abc.Callable[[float], None]:
    return lambda fraction: report(stage, start + (stop - start) * fraction)


def num_head_ids(asked: int | None, profile: Profile, num_vocab: int) -> int:
    """How many ids the draft may propose: what was asked for, else the profile's; 0 for all. A profile does not know
    the model, so what is more than its vocabulary means all."""
    if asked is not None:
        return asked
    return profile.draft.head_vocab if profile.draft.head_vocab < num_vocab else 0


def check_corpus(corpus: abc.Sequence[Path], asked: int | None, profile: Profile) -> None:
    """Raises ParameterError when there is a corpus, and nobody asks for a head that it would choose."""
    if corpus and asked is None and not profile.draft.head_vocab:
        raise ParameterError("corpus: it chooses the ids of a trimmed head, and none is asked for; give head_vocab too")


def pair_name(folder: Path) -> str:
    """What a pair in this folder is called: of the folder's name what a manifest allows."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", folder.resolve().name).lstrip("._-")[:100] or "pair"


def folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


# ------------------------------------------------------------------------------------------------------------ the work


@dataclass(frozen=True, slots=True)
class _File:
    """One file of the written verifier."""

    path: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class _Job:
    """What is to be made of two opened sources.

    kind             what the verifier will be
    predicted_bytes  its size then
    kept             it is that already
    """

    info: GgufInfo
    source: Source
    profile: Profile
    options: PairOptions
    kind: str
    predicted_bytes: int
    kept: bool

    @property
    def sources(self) -> list[Path]:
        """All that is read."""
        imatrix = [self.options.imatrix] if self.options.imatrix else []
        return [*self.info.paths, self.source.path, *self.options.corpus, *imatrix]

    @property
    def head_vocab(self) -> int:
        """0 for all ids."""
        return num_head_ids(self.options.head_vocab, self.profile, self.source.dimensions.num_vocab)

    def shape(self, num_bytes: int) -> ModelShape:
        return self.info.shape.resized(num_bytes, self.kind)

    def check_memory(self, budget: Budget) -> None:
        """Before any work, with predicted sizes. Other types are predicted only when they matter."""
        from quantize.gguf_shape import draft_shape

        d = self.profile.draft
        draft = draft_shape(self.source, d.bits, d.block_size, num_head_vocab=self.head_vocab)
        setup = Setup.of(self.profile, self.shape(self.predicted_bytes), draft, budget)
        if not setup.cache_fits:
            raise ProfileError(
                f"profile {self.profile.name} wants a KV cache of {setup.kv_type_k}/{setup.kv_type_v}, whose blocks do "
                f"not divide this verifier's heads of {setup.verifier.head_size_k}; use a profile with f16"
            )
        plan = plan_memory(setup)
        if not plan.fits:
            plan.check(self._smaller_types())

    def _smaller_types(self) -> dict[str, int]:
        from quantize.verifier import predicted_bytes

        if self.info.is_quantized and not self.options.requantize:
            return {}
        sizes = {kind: predicted_bytes(self.info.path, kind) for kind in SMALLER_TYPES}
        return {kind: size for kind, size in sizes.items() if size < self.predicted_bytes}

    def choose_head(self, report: Progress) -> HeadChoice | None:
        if not self.head_vocab:
            return None
        from quantize.head import choose_head

        options = self.options
        return choose_head(
            self.source.path,
            self.head_vocab,
            corpus=options.corpus,
            num_threads=options.num_threads,
            progress=report,
        )

    def build_draft(self, folder: Path, head: HeadChoice | None, report: Progress) -> ModelShape:
        """Its shape, with the size of what was written."""
        from quantize.draft import build_draft
        from quantize.gguf_shape import draft_shape

        d, ids = self.profile.draft, None if head is None else head.ids
        build_draft(self.source.path, folder, bits=d.bits, block_size=d.block_size, head=ids, progress=report)
        shape = draft_shape(self.source, d.bits, d.block_size, num_head_vocab=0 if ids is None else len(ids))
        return shape.resized(folder_bytes(folder), shape.kind)

    def write_verifier(self, folder: Path, report: Progress) -> list[_File]:
        if self.kept:
            return self._copy(folder, report)
        from quantize.verifier import quantize_verifier

        path, options = folder / f"{VERIFIER}.gguf", self.options
        quantize_verifier(
            self.info.path,
            path,
            self.kind,
            imatrix=options.imatrix,
            requantize=options.requantize,
            num_threads=options.num_threads,
            progress=lambda stage, fraction: report(stage, 0.9 * fraction),
        )
        sha256 = _copy_file(path, None, _within_stage(report, "checksum", 0.9, 1.0))
        return [_File(path.name, path.stat().st_size, sha256)]

    def _copy(self, folder: Path, report: Progress) -> list[_File]:
        """All parts, with the names by which llama.cpp finds one from the other."""
        files, count = [], len(self.info.paths)
        for i, path in enumerate(self.info.paths):
            name = f"{VERIFIER}.gguf" if count == 1 else f"{VERIFIER}-{i + 1:05}-of-{count:05}.gguf"
            sha256 = _copy_file(path, folder / name, _within_stage(report, "copying", i / count, (i + 1) / count))
            files.append(_File(name, (folder / name).stat().st_size, sha256))
        return files

    def manifest(self, out: Path, draft: Path, files: list[_File]) -> str:
        """See models/README.md."""
        from quantize.draft import MANIFEST as DRAFT_MANIFEST

        d = self.profile.draft
        top: dict[str, Any] = {"format": FORMAT, "name": pair_name(out)}
        verifier_name, draft_name = self.info.name or self.info.path.stem, _stem(self.source.path)
        top["description"] = f"{verifier_name} as {self.kind}, drafted by {draft_name} at {d.bits} bits"
        top |= {"license": self._license(), "profile": self.profile.name}
        draft_sha256 = hashlib.sha256((draft / DRAFT_MANIFEST).read_bytes()).hexdigest()
        first, *parts = map(asdict, files)
        verifier = first | ({"parts": parts} if parts else {})
        return tomli_w.dumps(top | {"verifier": verifier, "draft": {"path": DRAFT, "sha256": draft_sha256}})

    def _license(self) -> str:
        """Of the verifier, and of the draft's source where it is another."""
        from quantize.gguf_shape import read_gguf

        verifier = self.info.license or "unknown"
        draft = "unknown" if self.source.path.is_dir() else read_gguf(self.source.path).license or "unknown"
        return verifier if draft == verifier else f"{verifier} (verifier), {draft} (draft)"


def _stem(path: Path) -> str:
    """What a file is called, or a folder, whose name may have dots."""
    return path.absolute().name if path.is_dir() else path.stem


def _open(verifier: Path, draft: Path, profile: Profile, options: PairOptions) -> _Job:
    """Open both sources and decide what the verifier is to be."""
    from quantize.gguf_shape import read_gguf
    from quantize.source import open_source
    from quantize.verifier import predicted_bytes

    if verifier.is_dir():
        raise ModelFormatError(
            f"{verifier} is a folder; expected a GGUF file: convert it with llama.cpp's own convert_hf_to_gguf.py"
        )
    info, source = read_gguf(verifier), open_source(draft)
    kind = (profile.verifier.gguf_type if options.kind is None else options.kind).upper()
    have_bytes = info.shape.weights_bytes
    wanted_bytes = have_bytes if info.file_type == kind else predicted_bytes(verifier, kind)
    is_small = options.kind is None and info.is_quantized and have_bytes <= wanted_bytes * _SAME_SIZE
    if info.file_type == kind or is_small:
        if options.imatrix is not None:
            raise ParameterError(f"imatrix: {verifier} is {info.file_type} already and is kept as it is; leave it out")
        return _Job(info, source, profile, options, info.file_type, have_bytes, True)
    if info.is_quantized and not options.requantize:
        raise ParameterError(
            f"{verifier} is {info.file_type} already ({have_bytes / 1e6:.0f} MB); {kind} ({wanted_bytes / 1e6:.0f} MB) "
            "would cost quality twice; start from the F16 file, keep it as it is (--type "
            f"{info.file_type}), or allow it (--requantize)"
        )
    return _Job(info, source, profile, options, kind, wanted_bytes, False)


def _copy_file(source: Path, target: Path | None, report: abc.Callable[[float], None]) -> str:
    """Copy the content, if there is a target, and return its SHA-256."""
    digest, done, size = hashlib.sha256(), 0, max(1, source.stat().st_size)
    with contextlib.ExitStack() as stack:
        stream = stack.enter_context(source.open("rb"))
        out = stack.enter_context(target.open("wb")) if target else None
        while chunk := stream.read(1 << 22):
            digest.update(chunk)
            if out is not None:
                out.write(chunk)
            done += len(chunk)
            report(done / size)
    return digest.hexdigest()
