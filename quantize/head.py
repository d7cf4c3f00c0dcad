"""Which token ids a draft's head should speak: the most frequent in a corpus, or in text the model writes itself.

This module and its ``head_`` helpers are the toolkit's only ones that see the runtime: its drafter writes the text, its
tokenizer reads it.
"""

from __future__ import annotations

import collections.abc as abc
import contextlib
import itertools
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from edgespec.core.check import check_int
from edgespec.devices.probe import usable_threads
from quantize.draft import Progress, build_draft
from quantize.source import open_source

if TYPE_CHECKING:
    from quantize.head_text import TextSide

MAX_TEXT = 256  # tokens of a text that the model writes, beside its template's
_BUILD_SHARE = 0.3  # of the progress
# Tokens of a corpus that follow each other go into one half, since texts repeat their own words; fewer where the corpus
# is short, so that both halves get about the same.
_MAX_BLOCK, _NUM_BLOCKS, _BYTES_PER_TOKEN = 1024, 8, 4

Ids = NDArray[np.int64]
Counts = NDArray[np.float64]
# The number of a text, ids in it, and how often each is there.
Pieces = abc.Generator[tuple[int, Ids, Counts | float], None, None]


@dataclass(frozen=True, slots=True)
class HeadChoice:
    """
    ids          the chosen token ids, ascending
    coverage     fraction of tokens such a head can say, 0 to 1, in text it was not chosen by: one half of what was
                 counted, for a head that is chosen by the other half
    num_counted  how many tokens were counted
    """

    ids: list[int]
    coverage: float
    num_counted: int


def choose_head(
    source: Path,
    num_ids: int,
    *,
    corpus: abc.Sequence[Path] = (),
    num_tokens: int = 30_000,
    seed: int = 0,
    num_threads: int | None = None,
    progress: Progress | None = None,
) -> HeadChoice:
    """The ``num_ids`` ids most frequent in text, among equals the lowest; special tokens are always among them.

    source       a GGUF, or a checkpoint folder
    corpus       files of text or .jsonl (see head_corpus.py), counted to the end. Without any, the whole model is built
                 at 8 bits in a temporary folder and writes; besides the model that takes the memory of 8 short texts
    num_tokens   that it writes
    seed         the same one gives the same text, if the chat template does not write the date
    num_threads  None: the usable CPUs
    progress     called on this thread with what is being done and the finished fraction, 0 to 1

    Raises ParameterError (``num_ids`` out of range, a corpus without text), FileAccessError, BackendError, and what
    opening a source raises.
    """
    from quantize.head_text import open_text_side

    report = progress or (lambda stage, fraction: None)
    report("reading", 0.0)
    opened = open_source(source)
    num_vocab = opened.dimensions.num_vocab
    check_int("num_ids", num_ids, 1, num_vocab)
    check_int("num_tokens", num_tokens, 1)
    check_int("seed", seed, 0)
    check_int("num_threads", 1 if num_threads is None else num_threads, 1)
    threads = usable_threads(num_threads)
    with open_text_side(source, opened.tokens) as side:
        always = np.array(sorted(side.end_tokens | side.special), dtype=np.int64)
        check_int(f"num_ids, with {len(always)} special tokens", num_ids, max(1, len(always)), num_vocab)
        num_ctx = min(opened.dimensions.num_ctx, len(side.start) + len(side.bridge) + MAX_TEXT)
        if corpus:
            pieces = _read(corpus, side, report)
        else:
            pieces = _written(source, side, num_ctx, num_tokens, seed, threads, report)
        with contextlib.closing(pieces):
            counts = _count(pieces, num_vocab)
    report("done", 1.0)
    ids = _most_frequent(counts.sum(axis=0), always, num_ids)
    return HeadChoice(ids.tolist(), _coverage(counts, always, num_ids), round(counts.sum()))


def _count(pieces: Pieces, num_vocab: int) -> Counts:
    """How often each id occurs, (2, num_vocab): in the texts of even numbers, and of odd ones."""
    counts = np.zeros((2, num_vocab))
    for number, ids, times in pieces:
        np.add.at(counts[number % 2], ids, times)
    return counts


def _most_frequent(counts: Counts, always: Ids, num_ids: int) -> Ids:
    """Those of ``always`` and the most frequent others, ascending."""
    first = np.zeros(len(counts), dtype=bool)
    first[always] = True
    ranking = np.lexsort((np.arange(len(counts)), -counts, ~first))
    return np.sort(ranking[:num_ids])


def _coverage(counts: Counts, always: Ids, num_ids: int) -> float:
    """See HeadChoice."""
    covered = sum(counts[i][_most_frequent(counts[1 - i], always, num_ids)].sum() for i in (0, 1))
    return min(1.0, float(covered / counts.sum()))


def _read(corpus: abc.Sequence[Path], side: TextSide, report: Progress) -> Pieces:
    """Blocks of the corpus take turns in the two halves: the files may be a single text, or differ a lot in length."""
    from quantize.head_corpus import num_bytes, read_texts

    block = max(1, min(_MAX_BLOCK, num_bytes(corpus) // (_BYTES_PER_TOKEN * _NUM_BLOCKS)))
    num_read = 0
    for text, fraction in read_texts(corpus):
        ids = np.asarray(side.encode(text), dtype=np.int64)
        half = (num_read + np.arange(len(ids))) // block % 2
        yield from ((number, ids[half == number], 1.0) for number in (0, 1))
        num_read += len(ids)
        report("counting", fraction)


def _written(
    source: Path, side: TextSide, num_ctx: int, num_tokens: int, seed: int, num_threads: int, report: Progress
) -> Pieces:
    """What the model might have written at each of ``num_tokens`` places, and how likely: measured on answers to other
    prompts, such a head covers more than one chosen by twice as many of the tokens that were drawn.

    Its temporary folder goes when this ends, however it ends.
    """
    from edgespec.drafters.onnx import OnnxDrafter
    from quantize.head_writer import NUM_SLOTS, Writer

    with tempfile.TemporaryDirectory(prefix="edgespec-head-") as folder, contextlib.ExitStack() as undo:
        built = build_draft(
            source, Path(folder) / "draft", bits=8, progress=lambda stage, done: report(stage, _BUILD_SHARE * done)
        )
        drafter = OnnxDrafter.open(built, num_ctx=num_ctx, num_threads=num_threads, num_slots=NUM_SLOTS)
        undo.callback(drafter.close)
        pieces = Writer(drafter, side, num_ctx, seed).pieces()
        places = ((number, *place) for number, draft in pieces for place in draft.distributions or ())
        for num_written, place in enumerate(itertools.islice(places, num_tokens)):
            yield place
            report("writing text", _BUILD_SHARE + (1.0 - _BUILD_SHARE) * num_written / num_tokens)
