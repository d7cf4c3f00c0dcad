"""Two models over the same texts, a block of positions at a time: rows of a large vocabulary are never all kept."""

from __future__ import annotations

import collections.abc as abc
import statistics
import time
from contextlib import ExitStack
from pathlib import Path

from edgespec.agreement.metrics import Shared, Tally, position_tally
from edgespec.agreement.result import Agreement
from edgespec.agreement.scorers import Encode, Progress, Scorer, is_checkpoint, opened
from edgespec.agreement.texts import Piece, cut, read_texts
from edgespec.core.check import check_int
from edgespec.core.ranking import Row, most_likely
from edgespec.devices.probe import usable_threads
from edgespec.drafters import vocabulary
from edgespec.errors import BackendError, ParameterError

BLOCK = 64  # positions scored at once: one llama_decode
NUM_STEPS, STEPS_CONTEXT = 24, 64  # single tokens that are timed, and how many stand before them
BUILD_SHARE = 0.25  # of the progress, for each checkpoint that has to be built


def compare(
    subject: Path,
    source: Path,
    *,
    texts: Path | None = None,
    max_tokens: int = 2000,
    num_threads: int | None = None,
    progress: Progress | None = None,
) -> Agreement:
    """Say how well ``subject`` stands for ``source``, which is right by definition. Blocks; all happens on this thread.

    subject, source  each a GGUF, a draft folder, a published .onnx (or its folder), or a checkpoint's folder; a
                     checkpoint is built at 32 bits into a temporary folder, which takes 4 bytes a weight
    texts            UTF-8: a .jsonl file of {"text", "category"} lines, or any file as one text; None: our own
    max_tokens       positions to compare, about: the share of each text that gives them
    num_threads      None: the usable CPUs
    progress         called on this thread with what is being done and the finished fraction, 0 to 1

    Raises ParameterError, PromptError (texts), ModelNotFoundError, ModelFormatError, FileAccessError,
    VocabularyMismatchError, MissingDependencyError, or BackendError (a model that fails, or gives NaN).
    """
    check_int("max_tokens", max_tokens, 1)
    check_int("num_threads", 1 if num_threads is None else num_threads, 1)
    num_threads = usable_threads(num_threads)
    report = progress or (lambda stage, fraction: None)
    report("loading", 0.0)
    found = read_texts(texts, max_tokens)
    with ExitStack() as stack:
        scorers, begun = [], 0.0
        for path in (source, subject):
            scorers.append(stack.enter_context(opened(path, num_threads, _part(report, begun, BUILD_SHARE))))
            begun += BUILD_SHARE if is_checkpoint(path) else 0.0
        pair = _Pair(source, subject, *scorers)
        pieces = cut(found, pair.encode, max_tokens=max_tokens, num_vocab=pair.num_vocab, num_ctx=pair.num_ctx)
        tallies = _tallies(pair, pieces, _part(report, begun, 1.0 - begun))
        result = _result(pair, tallies, max(pieces, key=lambda piece: len(piece.tokens)), len(found), num_threads)
    report("done", 1.0)
    return result


def _part(report: Progress, start: float, size: float) -> Progress:
    """Progress of a part, within the whole."""
    return lambda stage, fraction: report(stage, start + size * fraction)


class _Pair:
    """Both models. Raises VocabularyMismatchError unless they speak the same tokens."""

    def __init__(self, source_path: Path, subject_path: Path, source: Scorer, subject: Scorer) -> None:
        vocabulary.check(subject.tokens, source.tokens)
        self.source_path, self.subject_path, self.source, self.subject = source_path, subject_path, source, subject
        self.num_vocab = min(source.num_vocab, subject.num_vocab)
        self.num_ctx = min(source.num_ctx, subject.num_ctx)
        self.shared = Shared(source.num_logits, subject.num_logits, subject.head)

    @property
    def encode(self) -> Encode:
        for scorer in (self.source, self.subject):
            if scorer.encode is not None:
                return scorer.encode
        raise ParameterError(
            f"neither {self.source_path} nor {self.subject_path} has a tokenizer to read texts with; compare with the "
            "GGUF or the checkpoint that the draft was built from"
        )

    def tally(self, tokens: list[int], start: int, stop: int, position: int) -> Tally:
        """Of the rows after tokens start..stop; ``position`` is the first one's among all."""
        theirs = self.source.score(tokens[:stop], stop - start)
        ours = self.subject.score(tokens[:stop], stop - start)
        tally = Tally()
        for i, (source_row, subject_row) in enumerate(zip(theirs, ours, strict=True)):
            _check_row(source_row, self.source_path)
            _check_row(self.shared.of_subject(subject_row), self.subject_path)
            tally.add(position_tally(source_row, subject_row, tokens[start + i + 1], position + i, self.shared))
        return tally


def _check_row(row: Row, path: Path) -> None:
    try:
        most_likely(row)
    except BackendError as error:
        raise BackendError(f"{path} gave no usable logits: {error}") from error


def _tallies(pair: _Pair, pieces: abc.Sequence[Piece], report: Progress) -> dict[str, Tally]:
    """By category, in the order of the texts."""
    tallies: dict[str, Tally] = {}
    num_done, num_all = 0, sum(len(piece.tokens) - 1 for piece in pieces)
    for category, tokens in pieces:
        end = len(tokens) - 1
        for start in range(0, end, BLOCK):
            report("comparing", num_done / num_all)
            stop = min(start + BLOCK, end)
            tallies.setdefault(category, Tally()).add(pair.tally(tokens, start, stop, num_done))
            num_done += stop - start
    return tallies


def _result(pair: _Pair, tallies: dict[str, Tally], timed: Piece, num_texts: int, num_threads: int) -> Agreement:
    total = Tally()
    for tally in tallies.values():
        total.add(tally)
    return Agreement(
        subject=pair.subject_path,
        source=pair.source_path,
        total=total.scores(),
        by_category={category: tally.scores() for category, tally in tallies.items()},
        num_texts=num_texts,
        num_head_vocab=None if pair.subject.head is None else len(pair.shared.head.ids),
        subject_bytes=pair.subject.num_bytes,
        source_bytes=pair.source.num_bytes,
        subject_ms=_step_ms(pair.subject, timed.tokens),
        source_ms=_step_ms(pair.source, timed.tokens),
        num_threads=num_threads,
    )


def _step_ms(scorer: Scorer, tokens: list[int]) -> float | None:
    """Median of single-token steps."""
    if not scorer.timed:
        return None
    num_steps = min(NUM_STEPS, len(tokens) - 1)
    context = min(STEPS_CONTEXT, len(tokens) - num_steps)
    scorer.score(tokens[:context], 1)
    times = []
    for stop in range(context + 1, context + num_steps + 1):
        start_s = time.perf_counter()
        scorer.score(tokens[:stop], 1)
        times.append(time.perf_counter() - start_s)
    return 1000 * statistics.median(times)
