"""The first stage: the teacher writes the text that the student is to learn from, and what it thinks of every token is
kept.

The text is the teacher's own (Agarwal et al., arXiv 2306.13649, for why), since what a draft must guess is what the
verifier says. Randomness depends on the seed and a text's number. The texts of a shard are written together from
nothing, so that a run that was killed and goes on makes the same ones.
"""

from __future__ import annotations

import collections.abc as abc
import contextlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from edgespec.errors import ParameterError
from quantize.distill.batch import Batch, Bits
from quantize.distill.corpus import Corpus, CorpusWriter, Text
from quantize.distill.decoder import Decoder
from quantize.distill.prompts import ENTRY, NEWS, PASSAGE_TASKS, FilePrompts, OwnPrompts, Passage, Prompts, as_passage
from quantize.distill.writing import Speech, Writing
from quantize.source import file_sha256

if TYPE_CHECKING:
    from quantize.head_text import TextSide

Progress = abc.Callable[[str, float], None]

_TEXTS_PER_ROW = 4  # of a shard: only at its end do rows stand idle
_FIRST_PASSAGES, _MORE_PASSAGES = 0.75, 0.25  # per row and shard
_USUAL_WRITTEN = 90  # tokens of answers in a text, until there are some to count


@dataclass(frozen=True, slots=True)
class GenerateSettings:
    """
    num_tokens  written by the teacher in all; the last shard goes a little beyond. It may be raised later
    seed        the same one gives the same text on the same machine
    batch_size  texts written at once
    max_length  tokens of a text
    max_answer  tokens of an answer
    prompts     a file of prompts instead of the shipped templates, see FilePrompts
    """

    num_tokens: int = 2_000_000
    seed: int = 0
    batch_size: int = 96
    max_length: int = 896
    max_answer: int = 160
    prompts: Path | None = None

    def __post_init__(self) -> None:
        """Raises ParameterError."""
        for name, least in (("num_tokens", 1), ("seed", 0), ("batch_size", 1), ("max_length", 1), ("max_answer", 1)):
            if (got := getattr(self, name)) < least:
                raise ParameterError(f"{name}: got {got}; allowed: {least} or more; choose another")

    def identity(self) -> dict[str, int | str]:
        """What makes texts different ones. Raises FileAccessError."""
        kept = {name: value for name, value in asdict(self).items() if name not in ("num_tokens", "prompts")}
        return kept | {"prompts": "" if self.prompts is None else file_sha256(self.prompts)}


def generate(
    teacher: Decoder,
    side: TextSide,
    tokens: abc.Sequence[str],
    folder: Path,
    settings: GenerateSettings,
    progress: Progress,
    stop: abc.Callable[[], bool] = lambda: False,
) -> Corpus:
    """Write shards into ``folder`` until there is enough, going on after those that are there.

    tokens    the raw vocabulary by id
    progress  called on this thread, "generating" and the finished fraction
    stop      asked at every step; where it says yes the shard under way is given up, and what there is is returned

    Raises ParameterError (texts too short for a chat, a folder made with other settings, a prompts file that is none),
    FileAccessError, ModelFormatError (a damaged folder).
    """
    speech = Speech(side, tokens, settings.max_length, settings.max_answer)
    speech.check()
    prompts: Prompts = OwnPrompts() if settings.prompts is None else FilePrompts(settings.prompts)
    writer = CorpusWriter(folder, settings.identity())
    watch = _Watch(writer, settings.num_tokens, progress, stop)
    with contextlib.suppress(_StoppedError):
        while writer.num_written < settings.num_tokens:
            _write_shard(_Plan(speech, prompts, settings, writer), teacher, watch)
    return Corpus(folder)


class _StoppedError(Exception):
    """Within this module: the caller wants to leave."""


@dataclass
class _Watch:
    """Tells how far it is and asks whether to go on, at every step.

    num_done  tokens of answers in texts of the shard under way
    """

    writer: CorpusWriter
    num_tokens: int
    progress: Progress
    stop: abc.Callable[[], bool]
    num_done: int = 0

    def step(self) -> None:
        """Raises _StoppedError."""
        self.progress("generating", min(1.0, (self.writer.num_written + self.num_done) / self.num_tokens))
        if self.stop():
            raise _StoppedError


@dataclass(frozen=True)
class _Plan:
    """What the next shard is to hold, known from the ones before: texts, of which some are about passages of earlier
    shards, and passages for later ones, so that nothing waits for anything. The first has no texts about passages;
    the next ones make up for it."""

    speech: Speech
    prompts: Prompts
    settings: GenerateSettings
    writer: CorpusWriter

    def texts(self) -> list[Writing]:
        """In the order of their numbers."""
        passages = [Passage(**passage) for passage in self.writer.passages]
        return [self._text(task, number, passages) for number, task in enumerate(self._tasks(), self.writer.num_texts)]

    def _text(self, task: str, number: int, passages: abc.Sequence[Passage]) -> Writing:
        random = np.random.default_rng((self.settings.seed, 0, number))
        return Writing(self.prompts.script(task, number, random, passages), self.speech, random)

    def _tasks(self) -> list[str]:
        """So many texts of each that the shares of written tokens come out right."""
        known, writer = bool(self.writer.passages), self.writer
        shares = {task: share for task, share in self.prompts.shares.items() if known or task not in PASSAGE_TASKS}
        num_texts = _TEXTS_PER_ROW * self.settings.batch_size
        counts = shared_out(num_texts, shares, writer.num_written_by_task, writer.num_texts_by_task)
        return [task for task, count in counts.items() for _ in range(count)]

    def passages(self) -> list[tuple[Passage, Writing]]:
        """Those to be written, without their text so far."""
        if set(self.prompts.shares).isdisjoint(PASSAGE_TASKS):
            return []
        per_row = _MORE_PASSAGES if self.writer.passages else _FIRST_PASSAGES
        return [self._passage(number) for number in range(max(2, round(per_row * self.settings.batch_size)))]

    def _passage(self, number: int) -> tuple[Passage, Writing]:
        random = np.random.default_rng((self.settings.seed, 1, self.writer.num_shards, number))
        kind = (NEWS, ENTRY)[number % 2]
        title, script = self.prompts.passage_script(kind, random)
        return Passage(kind, title, ""), Writing(script, self.speech, random)


def _write_shard(plan: _Plan, teacher: Decoder, watch: _Watch) -> None:
    """Texts of about the same length are in the batch together, since all rows cost what the longest costs. Raises
    _StoppedError, and nothing is written."""
    watch.num_done = 0
    texts, passages = plan.texts(), plan.passages()
    writings = sorted([*texts, *(writing for _, writing in passages)], key=lambda writing: writing.expected)
    batch = Batch(teacher, plan.settings.batch_size, plan.settings.max_length)
    hidden = dict[int, Bits]()
    for result in batch.run(writings):
        if result is None:
            watch.step()
            continue
        writing, hidden[id(writing)] = result
        watch.num_done += sum(writing.written) if writing.script.task != "passage" else 0
    for passage, writing in passages:
        text = plan.speech.side.decode(writing.answer)
        plan.writer.add_passage(asdict(as_passage(passage.kind, passage.title, text)))
    for writing in texts:
        plan.writer.add(_text(writing, hidden[id(writing)]))
    plan.writer.flush()


def _text(writing: Writing, hidden: Bits) -> Text:
    script = writing.script
    return Text(writing.tokens, np.array(writing.written), hidden, script.task, script.temperature)


def shared_out(
    num_texts: int,
    shares: abc.Mapping[str, float],
    num_written: abc.Mapping[str, int],
    num_before: abc.Mapping[str, int],
) -> dict[str, int]:
    """How many of ``num_texts`` each task gets, so that its share of all written tokens comes near what it should be.

    num_written, num_before  tokens and texts of each task so far, of which the length of the next ones is guessed
    """
    lengths = {t: (num_written.get(t, 0) + _USUAL_WRITTEN) / (num_before.get(t, 0) + 1) for t in shares}
    parts = {task: share / sum(shares.values()) for task, share in shares.items()}
    mean = 1 / sum(part / lengths[task] for task, part in parts.items())  # tokens of a text, in the right mix
    goal = sum(num_written.values()) + num_texts * mean
    wanted = {t: max(0.0, part * goal - num_written.get(t, 0)) / lengths[t] for t, part in parts.items()}
    ends = np.cumsum(list(wanted.values()))
    places = np.rint(ends * num_texts / ends[-1]).astype(int)
    return dict(zip(shares, np.diff(places, prepend=0).tolist(), strict=True))
