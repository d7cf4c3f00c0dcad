"""The stages of a distillation, each left out when its result is there already: text, training, export."""

from __future__ import annotations

import collections.abc as abc
import logging
import shutil
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from edgespec.devices.probe import usable_threads
from edgespec.errors import FileAccessError, ModelFormatError, ModelNotFoundError, ParameterError
from quantize.distill import checkpoint
from quantize.distill.corpus import Corpus, head_ids
from quantize.distill.decoder import Decoder, Ids
from quantize.distill.distilled import DistilledSource
from quantize.distill.draft_size import draft_bytes
from quantize.distill.generate import GenerateSettings, generate
from quantize.distill.history import History
from quantize.distill.lock import alone_in
from quantize.distill.out_folder import CORPUS, HEAD, HEAD_DIGEST, SPENT, TRAINING, check_out, remove
from quantize.distill.prompts import FilePrompts
from quantize.distill.result import DistillResult
from quantize.distill.room import Sizes, check_disk, check_memory, usual_rows
from quantize.distill.settings import DistillSettings, settle
from quantize.distill.spent import Spent
from quantize.distill.train import train
from quantize.distill.train_settings import TrainSettings
from quantize.distill.writing import Speech
from quantize.draft import MANIFEST, build_draft_of
from quantize.folder import new_file
from quantize.source import Source, file_sha256, open_source

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

logger = logging.getLogger("edgespec")

Progress = abc.Callable[[str, float], None]

EXPORTS: abc.Mapping[str, int] = {"int8": 8, "int4": 4}  # bits
# Most of a small model's file is the embedding, which has 4 bits in every export, and in the student that learns.
EMBEDDING_BITS = 4


def run(settings: DistillSettings, report: Progress) -> DistillResult:
    """See quantize.distill.distill."""
    if not settings.verifier.is_file():
        raise ModelNotFoundError(f"no model file at {settings.verifier}; give the path of a GGUF file")
    source = open_source(settings.verifier)
    settings = replace(settings.bounded(), num_rows=settings.num_rows or usual_rows(source.dimensions))
    layers = settings.kept_layers(source.dimensions.num_layers)
    _check_device(settings.device)
    sizes = _sizes(settings, source, layers)
    if settings.device == "cpu":
        check_memory(sizes)
    check_out(settings)
    check_disk(settings.out, sizes, settings.tokens)
    _check_text(settings, source)
    _tell_sizes(settings, source, layers, sizes.num_head)
    report("generate", 0.0)
    settings.work.mkdir(parents=True, exist_ok=True)
    with alone_in(settings.out):
        if settings.force:
            remove(settings.out)
        _settle(settings, source)
        torch.set_num_threads(usable_threads(settings.threads))
        return _Run(settings, source, layers, Spent.read(settings.work / SPENT), report).result()


def _sizes(settings: DistillSettings, source: Source, layers: tuple[int, ...]) -> Sizes:
    d = source.dimensions
    num_head = min(settings.head_vocab or d.num_vocab, d.num_vocab)
    rows = settings.num_rows or 1
    return Sizes(d, len(layers), num_head, rows, settings.max_length, settings.batch_size * settings.max_length)


def _tell_sizes(settings: DistillSettings, source: Source, layers: tuple[int, ...], num_head: int) -> None:
    head, told = num_head if num_head < source.dimensions.num_vocab else None, []
    for name, bits in EXPORTS.items():
        size = draft_bytes(source, layers, head, bits, EMBEDDING_BITS, settings.block_size)
        told.append(f"{name} about {size / 1e6:.1f} MB")
    logger.info("layers kept: %s; drafts: %s", ", ".join(map(str, layers)), ", ".join(told))


def _check_device(device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        raise ParameterError("device: got cuda, but torch finds no CUDA device here; allowed: cpu")


def _check_text(settings: DistillSettings, source: Source) -> None:
    """What the first stage would only say after the folder was made."""
    from quantize.head_text import open_text_side

    if settings.prompts is not None:
        FilePrompts(settings.prompts)
    with open_text_side(source.path, source.tokens) as side:
        Speech(side, source.tokens, settings.max_length, _max_answer(settings)).check()
        num_special, num_head = len(side.end_tokens | side.special), settings.head_vocab
    if 0 < num_head < num_special:
        raise ParameterError(
            f"head_vocab: got {num_head}; allowed: {num_special} (the special tokens) and more, or 0 for all"
        )


def _max_answer(settings: DistillSettings) -> int:
    """Short texts have short answers."""
    return min(GenerateSettings().max_answer, max(1, settings.max_length // 3))


def _settle(settings: DistillSettings, source: Source) -> None:
    digests = {"verifier_sha256": source.sha256()}
    if settings.prompts is not None:
        digests["prompts_sha256"] = file_sha256(settings.prompts)
    settle(settings, digests)


@dataclass(frozen=True, slots=True)
class _Run:
    settings: DistillSettings
    source: Source
    layers: tuple[int, ...]
    spent: Spent
    report: Progress

    def result(self) -> DistillResult:
        corpus = self.corpus()
        head = self.head(corpus)
        student, history = self.trained(corpus, head)
        made_of = checkpoint.newest(self.settings.work / TRAINING)
        assert made_of is not None
        drafts = self.drafts(student, head, history, made_of.sha256)
        prompts = self.settings.prompts
        facts = {**self.settings.as_dict(), "layers": list(self.layers), "checkpoint": made_of.sha256}
        facts |= {"verifier": self.settings.verifier.name, "prompts": prompts and prompts.name}
        facts |= {"num_texts": len(corpus), "num_tokens_written": corpus.num_written}
        facts |= {"num_tokens_by_task": corpus.num_written_by_task, "text_s": round(self.spent.text_s)}
        return DistillResult(self.settings.out, self.settings.verifier, drafts, history, facts, made_of.sha256)

    # ----------------------------------------------------------------------------------------------------------- text

    def corpus(self) -> Corpus:
        """Written to the end of what tokens and hours allow."""
        folder, wanted = self.settings.work / CORPUS, (self.settings.tokens, self.settings.hours)
        if self.spent.written_for != wanted or not folder.is_dir() or self._lacks_text(folder):
            self.write(folder)
            self.spent.written_for = wanted
            self.spent.save()
        self.report("generate", 1.0)
        return Corpus(folder)

    def _lacks_text(self, folder: Path) -> bool:
        """A shard was lost, where no hours say how much there was."""
        return self.settings.hours is None and Corpus(folder).num_written < (self.settings.tokens or 0)

    def write(self, folder: Path) -> None:
        """A shard at a time where there are hours to keep: what is half written when they end would be lost."""
        from quantize.head_text import open_text_side

        teacher = Decoder.of(self.source, dtype=torch.bfloat16, device=self.settings.device)
        with open_text_side(self.source.path, self.source.tokens) as side:

            def go_on(num_tokens: int, progress: Progress) -> Corpus:
                return generate(teacher, side, self.source.tokens, folder, self._generating(num_tokens), progress)

            if self.settings.hours is None:
                assert self.settings.tokens is not None
                go_on(self.settings.tokens, lambda _, fraction: self.report("generate", fraction))
            else:
                self._write_by_the_clock(go_on)

    def _generating(self, num_tokens: int) -> GenerateSettings:
        s = self.settings
        assert s.num_rows is not None
        return GenerateSettings(
            num_tokens=num_tokens,
            seed=s.seed,
            batch_size=s.num_rows,
            max_length=s.max_length,
            max_answer=_max_answer(s),
            prompts=s.prompts,
        )

    def _write_by_the_clock(self, go_on: abc.Callable[[int, Progress], Corpus]) -> None:
        num_tokens, shard_s = 1, 0.0
        whole_s = self.spent.text_s + self.spent.text_left_s(self.settings)
        while num_tokens == 1 or self.spent.text_left_s(self.settings) > shard_s / 2:
            begun_s, before_s = time.monotonic(), self.spent.text_s

            def progress(_: str, fraction: float, begun_s: float = begun_s, before_s: float = before_s) -> None:
                by_clock = (before_s + time.monotonic() - begun_s) / whole_s
                self.report("generate", min(0.99, by_clock))

            corpus = go_on(num_tokens, progress)
            shard_s = time.monotonic() - begun_s
            self.spent.text_s += shard_s
            self.spent.save()
            if corpus.num_written >= (self.settings.tokens or float("inf")) or self._disk_is_full(corpus):
                return
            num_tokens = corpus.num_written + 1

    def _disk_is_full(self, corpus: Corpus) -> bool:
        """Whether another shard, and the training's checkpoints, might not fit."""
        d = self.source.dimensions
        shard = 2 * d.width * corpus.num_tokens // max(1, corpus.num_shards)
        needed = 2 * shard + _sizes(self.settings, self.source, self.layers).disk_bytes(0)
        free = shutil.disk_usage(self.settings.out).free
        if free < needed:
            logger.warning("the disk is nearly full (%.1f GB free): no more text is written", free / 1e9)
        return free < needed

    # -------------------------------------------------------------------------------------------------------- training

    def head(self, corpus: Corpus) -> Ids | None:
        """Chosen once: the weights belong to it. None for the whole vocabulary."""
        path, num_vocab = self.settings.work / HEAD, self.source.dimensions.num_vocab
        num_ids = min(self.settings.head_vocab, num_vocab)
        if num_ids in (0, num_vocab):
            return None
        if not path.is_file():
            self._choose_head(path, corpus, num_ids)
        try:
            chosen: Ids = np.load(path, allow_pickle=False)
            noted = self.settings.work / HEAD_DIGEST
            is_noted = not noted.is_file() or noted.read_text(encoding="ascii").strip() == file_sha256(path)
            if not is_noted or chosen.shape != (num_ids,) or np.any(np.diff(chosen) <= 0):
                raise ValueError(chosen.shape)
        except (OSError, ValueError) as error:
            raise ModelFormatError(f"{path} is damaged; begin anew with --force") from error
        return chosen

    def _choose_head(self, path: Path, corpus: Corpus, num_ids: int) -> None:
        """From what was written so far: later text would give another one."""
        from quantize.head_text import open_text_side

        if checkpoint.newest(self.settings.work / TRAINING) is not None:
            raise ModelFormatError(f"{path} is gone, to which what was trained belongs; begin anew with --force")
        with open_text_side(self.source.path, self.source.tokens) as side:
            ids = head_ids(corpus, num_ids, side.end_tokens | side.special, self.source.dimensions.num_vocab)
        with new_file(path, force=False) as made:
            with made.open("wb") as stream:
                np.save(stream, ids)
            (self.settings.work / HEAD_DIGEST).write_text(file_sha256(made) + "\n", encoding="ascii")

    def trained(self, corpus: Corpus, head: Ids | None) -> tuple[Decoder, History]:
        s = self.settings
        self.report("train", 0.0)
        hours = self.spent.promise(s)
        self.spent.save()
        settings = TrainSettings(
            epochs=s.epochs,
            hours=hours,
            batch_size=s.batch_size,
            max_length=s.max_length,
            learning_rate=s.learning_rate,
            hidden_weight=s.hidden_weight,
            round_to=min(EXPORTS.values()),
            block_size=s.block_size,
            seed=s.seed,
        )
        student = Decoder.of(
            self.source,
            self.layers,
            head=head,
            embedding_bits=EMBEDDING_BITS,
            block_size=s.block_size,
            device=s.device,
        )
        history = train(student, corpus, self._teacher_head(head), settings, s.work / TRAINING, self.report)
        return student, history

    def _teacher_head(self, head: Ids | None) -> torch.Tensor:
        matrix = self.source.matrix("token_embd.weight" if self.source.tied else "output.weight")
        rows = matrix if head is None else matrix.take(head)
        return torch.from_numpy(rows.read(0, rows.shape[0])).bfloat16()

    # ---------------------------------------------------------------------------------------------------------- export

    def drafts(self, student: Decoder, head: Ids | None, history: History, digest: str) -> dict[str, Path]:
        made = {}
        for place, (name, bits) in enumerate(EXPORTS.items()):
            made[name] = self.settings.out / f"draft-{name}"
            if not _is_of(made[name], digest):
                build_draft_of(
                    DistilledSource(self.source, student, head),
                    made[name],
                    bits=bits,
                    block_size=self.settings.block_size,
                    embedding_bits=EMBEDDING_BITS,
                    head=None if head is None else head.tolist(),
                    facts={"distilled": self._facts(history, digest)},
                    force=True,
                    progress=_part(self.report, "export", place / len(EXPORTS), 1 / len(EXPORTS)),
                )
        self.report("export", 1.0)
        return made

    def _facts(self, history: History, digest: str) -> dict[str, Any]:
        last = history.points[-1]
        facts = {"checkpoint": digest, "layers": list(self.layers), "seed": self.settings.seed}
        return facts | {"num_steps": last.step, "num_tokens": last.num_tokens}


def _part(report: Progress, stage: str, start: float, size: float) -> Progress:
    return lambda _, fraction: report(stage, start + size * fraction)


def _is_of(draft: Path, digest: str) -> bool:
    """Whether it was made of that state already, and is whole."""
    try:
        manifest = tomllib.loads((draft / MANIFEST).read_text(encoding="utf-8"))
        digests: dict[str, str] = manifest["sha256"]
        is_of = manifest["distilled"]["checkpoint"] == digest
        return is_of and all(file_sha256(draft / name) == noted for name, noted in digests.items())
    except (OSError, FileAccessError, ValueError, LookupError, TypeError, AttributeError):  # damaged in any way
        return False
