"""Training a tiny student: it learns, and an interrupted training ends as one that was not."""

from __future__ import annotations

import collections.abc as abc
import itertools
import os
import signal
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import log_softmax

from edgespec.errors import ModelFormatError, ParameterError
from quantize.distill import checkpoint
from quantize.distill.batches import Batch, collate, epoch, split
from quantize.distill.corpus import Corpus, CorpusWriter, Text
from quantize.distill.decoder import Decoder
from quantize.distill.divergence import backward, compare
from quantize.distill.history import History
from quantize.distill.schedule import Schedule
from quantize.distill.train import train
from quantize.distill.train_settings import TrainSettings
from quantize.source import Source, open_source
from tests.quantize.distill.taught import HEAD, head_of, student_of, write_corpus

SETTINGS = TrainSettings(
    epochs=4, batch_size=4, max_length=32, learning_rate=3e-3, warm_up=3, eval_every=10, eval_tokens=200
)


@pytest.fixture(autouse=True)
def one_thread() -> abc.Iterator[None]:
    """More only wait for each other, on tensors this small."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def source(tiny_gguf: Path) -> Source:
    return open_source(tiny_gguf)


@pytest.fixture(scope="module")
def corpus(source: Source, tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "corpus", source, 60)


@pytest.fixture
def student(source: Source) -> Decoder:
    return student_of(source)


def stop_after(steps: int) -> abc.Callable[[], bool]:
    counter = itertools.count(1)
    return lambda: next(counter) >= steps


def trained(
    source: Source, corpus: Corpus, folder: Path, settings: TrainSettings = SETTINGS
) -> tuple[Decoder, History]:
    student = student_of(source)
    return student, train(student, corpus, head_of(source), settings, folder)


def same_weights(one: Decoder, other: Decoder) -> bool:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all(torch.equal(mine, theirs) for mine, theirs in pairs)


# ------------------------------------------------------------------------------------------------------------ learning


@pytest.mark.parametrize("change", [{"learning_rate": 1e30}, {"hidden_weight": 1e300}])
def test_a_loss_that_is_no_number_ends_it(
    change: dict[str, float], source: Source, corpus: Corpus, tmp_path: Path
) -> None:
    """Before a checkpoint is made of it."""
    with pytest.raises(
        ParameterError, match=r"^learning_rate: got .* the loss is (nan|inf) at step \d+; begin anew"
    ) as e:
        trained(source, corpus, tmp_path, replace(SETTINGS, **change))  # type: ignore[arg-type]
    assert "\n" not in str(e.value)
    assert checkpoint.newest(tmp_path, "step") is None


def test_texts_that_were_lost(source: Source, corpus: Corpus, tmp_path: Path) -> None:
    train(student_of(source), corpus, head_of(source), SETTINGS, tmp_path / "training", stop=stop_after(1))
    fewer = write_corpus(tmp_path / "corpus", source, 40)
    with pytest.raises(ModelFormatError, match="was trained on 60 texts, of which 40 are there"):
        trained(source, fewer, tmp_path / "training")


def test_the_loss_falls_and_agreement_rises(source: Source, corpus: Corpus, tmp_path: Path) -> None:
    calls: list[tuple[str, float]] = []
    student = student_of(source)
    history = train(student, corpus, head_of(source), SETTINGS, tmp_path, lambda *call: calls.append(call))
    first, last = history.points[0], history.points[-1]
    assert history.finished
    assert last.step == history.num_steps
    assert last.held_out_loss < 0.8 * first.held_out_loss
    assert last.agreement > first.agreement
    assert last.held_out_hidden < first.held_out_hidden
    assert first.loss is None
    losses = [point.loss for point in history.points[1:]]
    assert losses[-1] < losses[0]  # type: ignore[operator]
    assert (history.num_texts, history.num_held_out) == (51, 9)
    assert [fraction for _, fraction in calls] == sorted(fraction for _, fraction in calls)
    assert calls[-1] == (f"train: {last.agreement:.1%} agree, loss {last.held_out_loss:.3f} at step {last.step}", 1.0)
    assert History.of(history.as_dict()) == history


def test_the_gradient_is_that_of_the_plain_formula(source: Source, corpus: Corpus, student: Decoder) -> None:
    """Slices, shortcuts and the hand-made gradient against what autograd makes of the definition."""
    head = head_of(source)
    batch = collated([corpus.read(i) for i in range(6)], 32)

    def hidden() -> torch.Tensor:
        states: torch.Tensor = student(batch.tokens).flatten(0, 1)[batch.places]
        return states

    found = backward(student, hidden(), batch.taught, head.bfloat16(), 0.5)
    ours = [parameter.grad.clone() for parameter in student.parameters() if parameter.grad is not None]
    student.zero_grad()
    states = hidden()
    theirs = log_softmax((batch.taught @ head.bfloat16().T).float(), -1)
    kl = (theirs.exp() * (theirs - log_softmax(student.logits(states), -1))).sum(-1)
    distance = 1 - torch.cosine_similarity(states, batch.taught.float(), dim=-1)
    (kl + 0.5 * distance).mean().backward()  # type: ignore[no-untyped-call]
    assert found.loss == pytest.approx(kl.mean().item(), rel=1e-4)
    assert found.hidden == pytest.approx(distance.mean().item(), rel=1e-4)
    expected = [parameter.grad for parameter in student.parameters() if parameter.grad is not None]
    assert len(ours) == len(expected) > 5
    for mine, right in zip(ours, expected, strict=True):
        assert torch.allclose(mine, right, rtol=1e-3, atol=1e-6 + 1e-4 * float(right.abs().max()))


def test_a_comparison_counts_the_written_positions(source: Source, corpus: Corpus) -> None:
    teacher, head = Decoder.of(source, head=HEAD), head_of(source)
    batch = collated([corpus.read(0), corpus.read(1)], 448)
    with torch.no_grad():
        hidden = teacher(batch.tokens).flatten(0, 1)[batch.places]
    found = compare(teacher, hidden, batch.taught, head, batch.written)
    assert found.num_positions == len(batch.places)
    assert found.num_written == int(batch.written.sum())
    assert found.num_agreed >= 0.95 * found.num_written  # its states were rounded
    assert found.loss / found.num_positions < 1e-3
    wrong = compare(student_of(source), torch.randn_like(hidden), batch.taught, head, batch.written)
    assert wrong.num_agreed < 0.5 * wrong.num_written


def test_hidden_states_can_be_learned_too(source: Source, corpus: Corpus, tmp_path: Path) -> None:
    settings = replace(SETTINGS, hidden_weight=5.0)
    _, plain = trained(source, corpus, tmp_path / "plain")
    _, near = trained(source, corpus, tmp_path / "near", settings)
    assert near.points[-1].held_out_hidden < plain.points[-1].held_out_hidden


def test_texts_without_anything_to_learn(source: Source, tmp_path: Path) -> None:
    writer = CorpusWriter(tmp_path / "corpus", {})
    for number in range(40):
        text = Text([5, 6, 7], np.full(3, number % 2 == 0), np.ones((3, 64), dtype=np.uint16), "chat", 0.0)
        writer.add(text)
    writer.flush()
    settings = replace(SETTINGS, prompt_share=0.0, batch_size=1, max_length=3)
    student, history = trained(source, Corpus(tmp_path / "corpus"), tmp_path / "train", settings)
    assert history.finished
    assert all(bool(parameter.isfinite().all()) for parameter in student.parameters())


# ------------------------------------------------------------------------------------------------------------- batches


def collated(texts: abc.Sequence[Text], max_length: int, prompt_share: float = 1.0) -> Batch:
    return collate(texts, max_length, prompt_share, np.random.default_rng(0), "cpu")


def test_what_the_model_wrote_is_learned_from_and_a_share_of_the_rest(corpus: Corpus) -> None:
    text = corpus.read(0)
    length = len(text.tokens)
    all_of_it, own = collated([text], 448), collated([text], 448, 0.0)
    assert all_of_it.tokens.tolist() == own.tokens.tolist() == [text.tokens]
    assert all_of_it.num_tokens == own.num_tokens == length
    assert all_of_it.places.tolist() == list(range(length - 1))
    assert all_of_it.written.tolist() == [False, False] + [True] * (length - 3)
    assert own.places.tolist() == list(range(2, length - 1))
    prompts = Text(text.tokens, np.zeros(length, dtype=bool), text.hidden, "chat", 0.0)
    some = collated([prompts] * 200, 448, 0.3)
    assert 0.25 < len(some.places) / (200 * (length - 1)) < 0.35


def test_rows_are_filled_up_and_long_texts_lose_their_beginning(corpus: Corpus) -> None:
    texts = [corpus.read(i) for i in range(5)]
    batch = collated(texts, 10)
    flat = batch.tokens.flatten()[batch.places]
    taught = batch.taught.view(torch.int16).numpy().view(np.uint16)
    start = 0
    for text in texts:
        length = min(10, len(text.tokens)) - 1
        assert flat[start : start + length].tolist() == text.tokens[-length - 1 : -1]
        assert np.array_equal(taught[start : start + length], text.hidden[-length - 1 : -1])
        start += length
    assert start == len(flat) == len(batch.written)


def test_an_epoch_has_every_text_once(corpus: Corpus) -> None:
    lengths = np.array([entry.num_tokens for entry in corpus.texts])
    numbers, held_out = split(len(corpus))
    batches = epoch(numbers, lengths, 100, 7, 0)
    assert sorted(np.concatenate(batches).tolist()) == numbers.tolist()
    assert all(len(batch) * lengths[batch].max() <= 100 for batch in batches)
    assert not set(numbers) & set(held_out)
    again = epoch(numbers, lengths, 100, 7, 0)
    assert all(np.array_equal(one, other) for one, other in zip(batches, again, strict=True))
    other_epoch = epoch(numbers, lengths, 100, 7, 1)
    assert [batch.tolist() for batch in other_epoch] != [batch.tolist() for batch in batches]


@pytest.mark.parametrize("num_texts", [16, 60, 399, 400, 5000])
def test_enough_is_held_out(num_texts: int) -> None:
    numbers, held_out = split(num_texts)
    assert len(numbers) + len(held_out) == num_texts
    assert 8 <= len(held_out) <= max(15, num_texts // 50 + 1)


def test_what_is_held_out_stays_so_when_a_corpus_grows() -> None:
    assert set(split(1000)[1]) <= set(split(3000)[1])


def test_too_few_texts(source: Source, tmp_path: Path, student: Decoder) -> None:
    few = write_corpus(tmp_path / "few", source, 5)
    with pytest.raises(ParameterError, match="5 texts; training needs at least 16"):
        train(student, few, head_of(source), SETTINGS, tmp_path / "train")


# ------------------------------------------------------------------------------------------------------------ schedule


def test_the_rate_warms_up_stays_and_decays() -> None:
    schedule = Schedule(10)
    assert schedule.factor(0) == pytest.approx(0.1)
    assert [schedule.factor(step) for step in (9, 50, 5000)] == [1.0, 1.0, 1.0]
    decaying = schedule.decaying(70, 100)
    assert [decaying.factor(step) for step in (70, 85, 99)] == pytest.approx([1.0, 0.5, 1 / 30])
    assert not decaying.is_over(99)
    assert decaying.is_over(100)
    hurried = decaying.decaying(85, 90)  # goes on from the rate it has
    assert [hurried.factor(step) for step in (85, 89)] == pytest.approx([0.5, 0.1])


# --------------------------------------------------------------------------------------------------------- interrupted


@pytest.mark.parametrize("after", [1, 13, 35])
def test_a_resumed_training_ends_as_an_uninterrupted_one(
    after: int, source: Source, corpus: Corpus, tmp_path: Path
) -> None:
    whole, history = trained(source, corpus, tmp_path / "whole")
    student = student_of(source)
    part = train(student, corpus, head_of(source), SETTINGS, tmp_path / "parts", stop=stop_after(after))
    assert not part.finished
    resumed, continued = trained(source, corpus, tmp_path / "parts")
    assert same_weights(resumed, whole)
    assert [without_time(point) for point in continued.points] == [without_time(point) for point in history.points]
    again, same = trained(source, corpus, tmp_path / "parts")  # nothing left to do
    assert same_weights(again, whole)
    assert same.as_dict() == continued.as_dict()


def without_time(point: object) -> dict[str, object]:
    return {name: getattr(point, name) for name in point.__slots__ if name != "seconds_s"}  # type: ignore[attr-defined]


def test_many_short_sittings(source: Source, corpus: Corpus, tmp_path: Path) -> None:
    whole, _ = trained(source, corpus, tmp_path / "whole")
    for _ in range(200):
        student = student_of(source)
        if train(student, corpus, head_of(source), SETTINGS, tmp_path / "parts", stop=stop_after(7)).finished:
            break
    assert same_weights(student, whole)


def test_a_longer_training_goes_on_from_before_the_decay(source: Source, corpus: Corpus, tmp_path: Path) -> None:
    _, short = trained(source, corpus, tmp_path / "grown")
    longer = replace(SETTINGS, epochs=6)
    grown, history = trained(source, corpus, tmp_path / "grown", longer)
    whole, _ = trained(source, corpus, tmp_path / "whole", longer)
    assert history.num_steps > short.num_steps
    assert same_weights(grown, whole)
    assert history.points[-1].seconds_s > short.points[-1].seconds_s  # what was given up is spent all the same


def test_a_corpus_that_grew(source: Source, tmp_path: Path) -> None:
    trained(source, write_corpus(tmp_path / "corpus", source, 40), tmp_path / "train")
    _, history = trained(source, write_corpus(tmp_path / "corpus", source, 80), tmp_path / "train")
    assert history.finished
    assert history.num_texts == 72
    assert history.points[-1].held_out_loss < history.points[0].held_out_loss


def test_hours_end_a_training(source: Source, corpus: Corpus, tmp_path: Path) -> None:
    settings = replace(SETTINGS, epochs=None, hours=2 / 3600)
    _, history = trained(source, corpus, tmp_path, settings)
    assert history.finished
    assert history.points[-1].learning_rate < 0.2 * SETTINGS.learning_rate  # it decayed
    assert history.points[-1].held_out_loss < history.points[0].held_out_loss
    longer = replace(settings, hours=3 / 3600)
    _, more = trained(source, corpus, tmp_path, longer)
    assert more.num_steps > history.num_steps


@pytest.mark.parametrize("change", [{"learning_rate": 1e-4}, {"seed": 3}, {"batch_size": 6}, {"epochs": 2}])
def test_another_training_is_not_gone_on_with(
    change: dict[str, float], source: Source, corpus: Corpus, tmp_path: Path
) -> None:
    train(student_of(source), corpus, head_of(source), SETTINGS, tmp_path, stop=stop_after(2))
    name, value = next(iter(change.items()))
    with pytest.raises(ParameterError, match=f"{name}: got {value}, the training began with {getattr(SETTINGS, name)}"):
        trained(source, corpus, tmp_path, replace(SETTINGS, **change))  # type: ignore[arg-type]


def test_a_damaged_checkpoint_is_refused(source: Source, corpus: Corpus, tmp_path: Path) -> None:
    settings = replace(SETTINGS, save_every_s=1e-9)
    train(student_of(source), corpus, head_of(source), settings, tmp_path, stop=stop_after(5))
    last = checkpoint.newest(tmp_path)
    assert last is not None
    last.path.write_bytes(last.path.read_bytes()[:-7])
    with pytest.raises(ModelFormatError, match=r"step-00000005.* is damaged.*delete it to go on from step 4, .*whole"):
        trained(source, corpus, tmp_path)
    last.path.unlink()
    resumed, history = trained(source, corpus, tmp_path)
    assert history.finished
    assert same_weights(resumed, trained(source, corpus, tmp_path / "whole")[0])


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
def test_a_signal_waits_for_the_step_and_a_checkpoint(source: Source, corpus: Corpus, tmp_path: Path) -> None:
    def progress(_: str, fraction: float) -> None:
        if fraction > 0.3 and not sent:
            sent.append(True)
            signal.raise_signal(signal.SIGINT)

    sent: list[bool] = []
    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            train(student_of(source), corpus, head_of(source), SETTINGS, tmp_path, progress)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert checkpoint.newest(tmp_path) is not None
    assert same_weights(trained(source, corpus, tmp_path)[0], trained(source, corpus, tmp_path / "whole")[0])


def test_a_training_on_another_thread(source: Source, corpus: Corpus, tmp_path: Path) -> None:
    found: list[History] = []
    thread = threading.Thread(target=lambda: found.append(trained(source, corpus, tmp_path)[1]))
    thread.start()
    thread.join()
    assert found[0].finished


@pytest.mark.parametrize(
    "change", [{"epochs": None}, {"epochs": 0}, {"hours": -1.0}, {"learning_rate": float("inf")}, {"prompt_share": 2}]
)
def test_settings_that_cannot_be(change: dict[str, float | None]) -> None:
    with pytest.raises(ParameterError, match="allowed"):
        replace(SETTINGS, **change)  # type: ignore[arg-type]
