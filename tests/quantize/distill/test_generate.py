"""A tiny teacher writes: what is kept is what it thought, and a run that was interrupted ends as one that was not."""

from __future__ import annotations

import collections.abc as abc
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from edgespec.errors import ParameterError
from quantize.distill.batch import Batch
from quantize.distill.corpus import Corpus, Text
from quantize.distill.decoder import Decoder
from quantize.distill.generate import GenerateSettings, generate, shared_out
from quantize.distill.prompts import SHARES, Script, Turn
from quantize.distill.writing import MAX_LOOP, Speech, Writing, _cut_text
from quantize.head_text import TextSide, open_text_side
from quantize.source import Source, open_source
from tests.tiny import IM_END, IM_START, TinyConfig, token_strings, write_gguf

TOKENS = token_strings(320)
SETTINGS = GenerateSettings(num_tokens=300, seed=5, batch_size=4, max_length=200, max_answer=12)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> abc.Iterator[None]:
    """More only wait for each other, on tensors this small."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    return open_source(write_gguf(tmp_path_factory.mktemp("teacher") / "tiny.gguf", TinyConfig(num_layers=1)))


@pytest.fixture(scope="module")
def side(source: Source) -> abc.Iterator[TextSide]:
    with open_text_side(source.path, source.tokens) as opened:
        yield opened


@pytest.fixture(scope="module")
def teacher(source: Source) -> Decoder:
    return Decoder.of(source)


@pytest.fixture(scope="module")
def corpus(teacher: Decoder, side: TextSide, tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """Two shards at least."""
    return run(teacher, side, tmp_path_factory.mktemp("corpus"), SETTINGS)


def run(
    teacher: Decoder,
    side: TextSide,
    folder: Path,
    settings: GenerateSettings,
    stop: abc.Callable[[], bool] = lambda: False,
) -> Corpus:
    return generate(teacher, side, TOKENS, folder, settings, lambda stage, fraction: None, stop)


def texts(corpus: Corpus) -> list[Text]:
    return [corpus.read(number) for number in range(len(corpus))]


def floats(text: Text) -> torch.Tensor:
    return torch.from_numpy(text.hidden.copy().view(np.int16)).view(torch.bfloat16).float()


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


# ------------------------------------------------------------------------------------------------------------ generate


def test_hidden_states_are_the_teachers(corpus: Corpus, teacher: Decoder) -> None:
    """Of every position, as if each text was read alone and at once."""
    for text in texts(corpus):
        with torch.inference_mode():
            expected = teacher(torch.tensor([text.tokens]))[0]
        torch.testing.assert_close(floats(text), expected, rtol=1e-2, atol=2e-2)


def test_greedy_answers_are_the_likeliest_tokens(corpus: Corpus, teacher: Decoder) -> None:
    num_checked = 0
    for text in texts(corpus):
        with torch.inference_mode():
            likeliest = teacher.logits(teacher(torch.tensor([text.tokens])))[0].argmax(-1)
        places = np.flatnonzero(text.written)
        same = likeliest[places - 1].numpy() == np.array(text.tokens)[places]
        assert same.all() or text.temperature > 0
        num_checked += text.temperature == 0
    assert 5 < num_checked < len(corpus)


def test_texts_are_chats(corpus: Corpus, side: TextSide) -> None:
    for text in texts(corpus):
        assert text.tokens[: len(side.start)] == list(side.start)
        assert not text.written[: len(side.start)].any()
        assert text.written.any()
        assert len(text.tokens) <= SETTINGS.max_length
        first = int(np.argmax(text.written))
        assert tuple(text.tokens[first - len(side.bridge) : first]) == side.bridge
        assert 0 < text.written.sum() <= 2 * SETTINGS.max_answer


def test_every_kind_is_there(corpus: Corpus) -> None:
    assert set(corpus.tasks) <= set(SHARES)
    assert {"summary", "retrieval", "translation", "question", "math"} <= set(corpus.tasks)
    assert corpus.num_shards >= 2
    assert {passage["kind"] for passage in corpus.passages} == {"news", "entry"}


def test_one_row_writes_what_many_write(teacher: Decoder, side: TextSide) -> None:
    """A batch-mate changes nothing but rounding, and the order of a shard's numbers is not that of their ends."""
    script = Script("chat", 0.7, (Turn("the"), Turn("and")))
    speech = Speech(side, TOKENS, SETTINGS.max_length, SETTINGS.max_answer)
    written = []
    for num_rows in (1, 3, 8):
        writings = [Writing(script, speech, np.random.default_rng((1, number))) for number in range(6)]
        done = [result for result in Batch(teacher, num_rows, SETTINGS.max_length).run(writings) if result is not None]
        assert len(done) == 6
        assert all(len(hidden) == len(writing.tokens) for writing, hidden in done)
        written.append([writing.tokens for writing in writings])
    assert written[0] == written[1] == written[2]
    assert len({tuple(tokens) for tokens in written[0]}) == 6


def test_an_interrupted_run_goes_on_the_same(teacher: Decoder, side: TextSide, tmp_path: Path) -> None:
    """Stopped at whatever step, again and again, and told to write little first."""
    whole = run(teacher, side, tmp_path / "whole", SETTINGS)
    num_steps, folder = 0, tmp_path / "parts"

    def stop() -> bool:
        nonlocal num_steps
        num_steps += 1
        assert not torch.is_inference_mode_enabled()  # the caller's own tensors are its own matter
        return num_steps in (1, 40, 150)

    sizes = [len(run(teacher, side, folder, replace(SETTINGS, num_tokens=1), stop)) for _ in range(2)]
    assert sizes == [0, 0]
    assert 0 < len(run(teacher, side, folder, replace(SETTINGS, num_tokens=1))) < len(whole)
    run(teacher, side, folder, SETTINGS, stop)
    run(teacher, side, folder, SETTINGS)
    assert content(folder) == content(tmp_path / "whole")
    run(teacher, side, folder, SETTINGS)  # enough is enough
    assert content(folder) == content(tmp_path / "whole")


def test_seeds_give_other_texts(corpus: Corpus, teacher: Decoder, side: TextSide, tmp_path: Path) -> None:
    other = run(teacher, side, tmp_path / "c", replace(SETTINGS, seed=6, num_tokens=1))
    tokens = {tuple(text.tokens) for text in texts(corpus)}
    assert not tokens & {tuple(text.tokens) for text in texts(other)}


def test_progress_rises_to_the_end(teacher: Decoder, side: TextSide, tmp_path: Path) -> None:
    seen = list[float]()
    generate(teacher, side, TOKENS, tmp_path, replace(SETTINGS, num_tokens=20), lambda _, f: seen.append(f))
    assert seen == sorted(seen)
    assert 0 <= seen[0] < 0.2
    assert seen[-1] == 1.0


def test_other_settings_are_refused(teacher: Decoder, side: TextSide, tmp_path: Path) -> None:
    run(teacher, side, tmp_path / "c", replace(SETTINGS, num_tokens=1))
    with pytest.raises(ParameterError, match="made with max_answer 12, not 11"):
        run(teacher, side, tmp_path / "c", replace(SETTINGS, max_answer=11))


def test_texts_without_room(teacher: Decoder, side: TextSide, tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match="max_length: got 30; a chat with an answer of 12 tokens needs"):
        run(teacher, side, tmp_path / "c", replace(SETTINGS, max_length=30))
    with pytest.raises(ParameterError, match="batch_size: got 0"):
        replace(SETTINGS, batch_size=0)


def test_a_users_prompts_are_answered(teacher: Decoder, side: TextSide, tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    path.write_text("\n".join(json.dumps({"turns": turns}) for turns in (["the"], ["in", "an"])), encoding="utf-8")
    settings = replace(SETTINGS, prompts=path, num_tokens=1)
    made = run(teacher, side, tmp_path / "c", settings)
    assert made.tasks == ("prompts",)
    assert made.passages == []
    for number, text in enumerate(texts(made)):
        words = side.encode("the" if number % 2 == 0 else "in")
        assert text.tokens[: len(side.start) + len(words)] == [*side.start, *words]
    path.write_text(json.dumps({"prompt": "an"}), encoding="utf-8")
    with pytest.raises(ParameterError, match="made with prompts"):
        run(teacher, side, tmp_path / "c", settings)


def test_a_model_without_chats(teacher: Decoder, side: TextSide, tmp_path: Path) -> None:
    plain = replace(side, start=(IM_END,), bridge=(), again=())
    made = run(teacher, plain, tmp_path / "c", replace(SETTINGS, num_tokens=1))
    newline = side.encode("\n")
    for text in texts(made):
        first = int(np.argmax(text.written))
        assert text.tokens[0] == IM_END
        assert text.tokens[first - 1 : first] == newline


# -------------------------------------------------------------------------------------------------------------- shares


def test_shares_of_a_first_shard() -> None:
    counts = shared_out(100, SHARES, {}, {})
    assert sum(counts.values()) == 100
    assert all(abs(counts[task] - 100 * share) <= 1 for task, share in SHARES.items())


def test_shares_come_right_whatever_the_lengths() -> None:
    """Answers of one task are ten times as long as those of another."""
    length = {task: (10, 40, 100)[i % 3] for i, task in enumerate(SHARES)}
    written, before = dict.fromkeys(SHARES, 0), dict.fromkeys(SHARES, 0)
    for _ in range(12):
        for task, count in shared_out(64, SHARES, written, before).items():
            written[task] += count * length[task]
            before[task] += count
    for task, share in SHARES.items():
        assert written[task] / sum(written.values()) == pytest.approx(share, rel=0.25)


# ------------------------------------------------------------------------------------------------------------- writing


def writing(side: TextSide, script: Script, *, max_length: int = 100, max_answer: int = 40) -> Writing:
    return Writing(script, Speech(side, TOKENS, max_length, max_answer), np.random.default_rng(0))


def say(text: Writing, *tokens: int) -> None:
    """The teacher reads what is due and writes."""
    for token in tokens:
        assert not text.done
        text.have_read(len(text.due))
        text.take(token)


def test_an_answer_ends_with_its_end_token(side: TextSide) -> None:
    text = writing(side, Script("chat", 0.5, (Turn("the", answer=" and"),)))
    begin = [*side.start, *side.encode("the"), *side.bridge, *side.encode(" and")]
    assert text.due == text.tokens == begin
    say(text, 50, IM_END)
    assert text.done
    assert text.due == [IM_END]  # it is read, too
    assert text.tokens == [*begin, 50, IM_END]
    assert text.written == [False] * len(begin) + [True, True]
    assert text.answer == [*side.encode(" and"), 50]


def test_a_second_turn(side: TextSide) -> None:
    for last, again in ((IM_END, side.again[1:]), (IM_START, side.again), (51, side.again)):
        text = writing(side, Script("chat", 0.5, (Turn("the"), Turn("an", goes_on=True))), max_answer=2)
        assert text.temperature == 0.5
        num_begin = len(text.tokens)
        say(text, 50, last)
        assert text.temperature == 0.8  # a user's words
        assert text.tokens[num_begin:] == [50, last, *again, *side.encode("an")]
        say(text, 60, TOKENS.index("Ċ"))
        assert text.temperature == 0.5
        assert text.tokens[-len(side.bridge) - 1 :] == [60, *side.bridge]
        say(text, IM_END)
        assert text.done
        assert sum(text.written) == 3


def test_a_second_turn_that_does_not_fit(side: TextSide) -> None:
    text = writing(side, Script("chat", 0.5, (Turn("the"), Turn("an"))), max_length=45, max_answer=4)
    say(text, 50, IM_END)
    assert text.done
    assert text.due == [IM_END]


@pytest.mark.parametrize(("task", "ends"), [("question", True), ("retrieval", True), ("chat", False)])
def test_questions_end_with_their_mark(task: str, ends: bool, side: TextSide) -> None:
    mark = TOKENS.index("?")
    for said in ([50, mark], [50, IM_END], [50] * 32 if ends else [50] * 64):
        text = writing(side, Script(task, 0.5, (Turn("the", goes_on=True),)), max_length=300)
        say(text, *said)
        asked = text.tokens[: len(text.tokens) - len(side.bridge)]
        assert text.tokens[len(asked) :] == list(side.bridge)
        assert (asked[-1] == mark) == (ends or mark in said)
        assert asked.count(mark) <= 1


def test_long_words_lose_their_middle(side: TextSide) -> None:
    words = "".join(chr(ord("a") + i % 26) for i in range(500))
    text = writing(side, Script("chat", 0.5, (Turn(words),)), max_length=100, max_answer=30)
    assert len(text.tokens) == 70
    said = side.decode(text.tokens[len(side.start) : -len(side.bridge)])
    assert words.startswith(said[:10])
    assert words.endswith(said[-10:])


@pytest.mark.parametrize("length", [1, 3, 30, 96])
def test_loops_are_cut(length: int, side: TextSide) -> None:
    text = writing(side, Script("chat", 0.0, (Turn("the"),)), max_length=1000, max_answer=500)
    num_said = 0
    while not text.done:
        say(text, 40 + num_said % length)
        num_said += 1
    assert num_said == length + MAX_LOOP


def test_what_only_looks_like_a_loop_is_not_cut(side: TextSide) -> None:
    """A list whose numbers differ."""
    text = writing(side, Script("chat", 0.0, (Turn("the"),)), max_length=1000, max_answer=500)
    for number in range(500):
        assert not text.done
        say(text, 40 + number % 10 if number % 10 else 60 + number // 10)


def test_a_huge_prompt_is_cut_before_it_is_encoded() -> None:
    words = "x" * 1000 + "y" * 10**6 + "z" * 1000
    assert _cut_text(words, 10) == "x" * 640 + "z" * 640
    assert _cut_text(words, 10**6) == words
