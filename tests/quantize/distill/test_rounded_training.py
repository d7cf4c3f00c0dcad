"""A training whose last part has weights as the draft of 4 bits will have them: what that draft is worth, and that it
can be interrupted."""

from __future__ import annotations

import collections.abc as abc
import itertools
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import linear, log_softmax

from edgespec.errors import ParameterError
from quantize.distill import checkpoint
from quantize.distill.batches import split
from quantize.distill.corpus import Corpus
from quantize.distill.decoder import Decoder
from quantize.distill.distilled import DistilledSource
from quantize.distill.history import History
from quantize.distill.schedule import DECAY_SHARE
from quantize.distill.train import train
from quantize.distill.train_settings import TrainSettings
from quantize.draft import build_draft_of
from quantize.source import Source, open_source
from tests.quantize.distill.taught import HEAD, head_of, write_corpus
from tests.quantize.reference import Draft

PLAIN = TrainSettings(
    epochs=10, batch_size=3, max_length=40, learning_rate=2e-3, warm_up=3, eval_every=50, block_size=64, prompt_share=1
)
ROUNDED = replace(PLAIN, round_to=4)
SHORT = replace(ROUNDED, epochs=2, eval_every=10)


@pytest.fixture(autouse=True)
def one_thread() -> abc.Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def source(tiny_gguf: Path) -> Source:
    return open_source(tiny_gguf)


@pytest.fixture(scope="module")
def corpus(source: Source, tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "corpus", source, 120)


def student_of(source: Source) -> Decoder:
    return Decoder.of(source, [0], head=HEAD, embedding_bits=4, block_size=64)


def trained(
    source: Source, corpus: Corpus, folder: Path, settings: TrainSettings, stop_after: int = 1 << 30
) -> tuple[Decoder, History]:
    student, counter = student_of(source), itertools.count(1)
    return student, train(student, corpus, head_of(source), settings, folder, stop=lambda: next(counter) >= stop_after)


def exported(source: Source, student: Decoder, folder: Path, bits: int) -> Draft:
    distilled = DistilledSource(source, student, HEAD)
    return Draft(build_draft_of(distilled, folder, bits=bits, embedding_bits=4, block_size=64, head=HEAD.tolist()))


def divergence(draft: Draft, source: Source, corpus: Corpus) -> float:
    """KL(teacher || draft) in nats, the mean over the positions of held-out texts that a token follows."""
    head, found = head_of(source), []
    for number in split(len(corpus))[1]:
        text = corpus.read(int(number))
        hidden = torch.from_numpy(text.hidden.view(np.int16).copy()).view(torch.bfloat16).float()
        theirs = log_softmax(linear(hidden, head), -1)[:-1]
        ours = log_softmax(torch.from_numpy(draft.rows(text.tokens, 1)), -1)[:-1]
        found.append((theirs.exp() * (theirs - ours)).sum(-1))
    return float(torch.cat(found).mean())


def without_time(history: History) -> list[object]:
    return [replace(point, seconds_s=0.0) for point in history.points]


def same_weights(one: Decoder, other: Decoder) -> bool:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all(torch.equal(mine, theirs) for mine, theirs in pairs)


def test_a_draft_of_4_bits_loses_little_and_is_what_was_looked_at(
    source: Source, corpus: Corpus, tmp_path: Path
) -> None:
    found, seen = {}, {}
    for name, settings in {"plain": PLAIN, "rounded": ROUNDED}.items():
        student, history = trained(source, corpus, tmp_path / name, settings)
        seen[name] = history.points[-1].held_out_loss
        for bits in (4, 8):
            draft = exported(source, student, tmp_path / f"{name}-{bits}", bits)
            found[name, bits] = divergence(draft, source, corpus)
    lost = found["plain", 4] - found["plain", 8]
    assert lost > 0.05 * found["plain", 8]
    assert found["rounded", 4] < found["plain", 4] - 0.4 * lost
    assert seen["plain"] == pytest.approx(found["plain", 8], rel=0.03)
    assert seen["rounded"] == pytest.approx(found["rounded", 4], rel=0.01)


def test_the_history_says_since_when(source: Source, corpus: Corpus, tmp_path: Path) -> None:
    _, plain = trained(source, corpus, tmp_path / "plain", replace(SHORT, round_to=None))
    _, history = trained(source, corpus, tmp_path / "rounded", SHORT)
    begin = history.rounded_from
    assert plain.rounded_from is None
    assert begin == round((1 - DECAY_SHARE) * history.num_steps)
    assert History.of(history.as_dict()) == history
    old = {name: value for name, value in plain.as_dict().items() if name != "rounded_from"}
    assert History.of(old) == plain
    before = [point for point in without_time(plain) if point.step <= begin]
    assert len(before) > 1
    assert without_time(history)[: len(before)] == before
    assert without_time(history)[len(before)] != without_time(plain)[len(before)]


@pytest.mark.parametrize("after", [5, 36, 45], ids=["before", "as it begins", "while rounded"])
def test_a_resumed_training_ends_as_an_uninterrupted_one(
    after: int, source: Source, corpus: Corpus, tmp_path: Path
) -> None:
    whole, history = trained(source, corpus, tmp_path / "whole", SHORT)
    _, part = trained(source, corpus, tmp_path / "parts", SHORT, stop_after=after)
    assert not part.finished
    assert (history.rounded_from, history.num_steps) == (36, 52)
    resumed, continued = trained(source, corpus, tmp_path / "parts", SHORT)
    assert same_weights(resumed, whole)
    assert without_time(continued) == without_time(history)
    assert continued.rounded_from == history.rounded_from


def test_a_longer_training_is_exact_again_at_first(source: Source, corpus: Corpus, tmp_path: Path) -> None:
    longer = replace(SHORT, epochs=3)
    _, short = trained(source, corpus, tmp_path / "grown", SHORT)
    grown, history = trained(source, corpus, tmp_path / "grown", longer)
    whole, expected = trained(source, corpus, tmp_path / "whole", longer)
    assert same_weights(grown, whole)
    assert history.rounded_from == expected.rounded_from > short.rounded_from  # type: ignore[operator]


def test_a_decay_that_is_hurried_began_when_it_did(source: Source, corpus: Corpus, tmp_path: Path) -> None:
    settings = replace(SHORT, epochs=None, hours=1.5 / 3600)
    student = student_of(source)

    def slower(_: str, fraction: float) -> None:
        time.sleep(0.06 if fraction > 0.75 else 0.0)

    history = train(student, corpus, head_of(source), settings, tmp_path, slower)
    stable = checkpoint.newest(tmp_path, "stable")
    assert stable is not None
    assert history.finished
    assert history.rounded_from == stable.step < history.num_steps


@pytest.mark.parametrize("change", [{"round_to": 8}, {"round_to": 0}, {"block_size": 0}])
def test_what_no_draft_has(change: dict[str, int]) -> None:
    with pytest.raises(ParameterError, match="allowed"):
        replace(PLAIN, **change)  # type: ignore[arg-type]


@pytest.mark.parametrize(("change", "name"), [({"round_to": None}, "round_to"), ({"block_size": 32}, "block_size")])
def test_another_rounding_is_another_training(
    change: dict[str, int | None], name: str, source: Source, corpus: Corpus, tmp_path: Path
) -> None:
    trained(source, corpus, tmp_path, SHORT, stop_after=2)
    with pytest.raises(ParameterError, match=f"^{name}: got {change[name]}, the training began with"):
        trained(source, corpus, tmp_path, replace(SHORT, **change))  # type: ignore[arg-type]
