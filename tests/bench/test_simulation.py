"""A simulation over tiny real models: what comes out is what was put in, slower."""

from __future__ import annotations

import collections.abc as abc
import json
from pathlib import Path

import pytest

from edgespec.bench import simulation
from edgespec.bench.device_curves import DEVICES
from edgespec.bench.rate import Run, acceptance, rate, rotated
from edgespec.bench.simulation import MAX_LATE, WIDTHS, Models, Outcome, Real, Simulation, device_mode, measure
from edgespec.bench.suite import Question, read_suite
from edgespec.core.policy import Fixed
from edgespec.core.sequence import SamplingParams
from edgespec.errors import EdgespecError, FileAccessError, ModelNotFoundError, PromptError

CARD = DEVICES["workstation-24gb"]
QUESTIONS = [Question("qa", "the cat"), Question("qa", "the ring and the king")]


@pytest.fixture(scope="module")
def models(tiny_gguf: Path, own_folder: Path) -> abc.Iterator[Models]:
    with Models(tiny_gguf, own_folder) as opened:
        yield opened


def test_every_mode_runs_on_every_prompt_and_says_the_same(models: Models) -> None:
    simulated = Simulation(QUESTIONS, SamplingParams(max_tokens=12, temperature=0.0), simulation.WAYS, Fixed(3))
    seen: list[tuple[str, float]] = []
    outcome = simulated.run(models, CARD, 1.0, lambda *step: seen.append(step))
    assert seen == [("simulated workstation-24gb", 0.0), ("simulated workstation-24gb", 0.5)]
    assert all(len(runs) == 2 for runs in outcome.runs.values())
    for one in zip(*outcome.runs.values(), strict=True):
        assert len({run.tokens for run in one}) == 1
    assert outcome.acceptance("sequential") == outcome.acceptance("overlapped") == 1.0
    content = outcome.as_dict()
    assert (content["simulated"], content["profile"]) == (True, "workstation-24gb")
    assert content["tokens_per_s"]["plain"] <= 1 / CARD.verify_s(1)
    assert content["over_plain"]["plain"] == 1.0
    json.dumps(content)
    # The models stay open for the next device.
    simulated = Simulation(QUESTIONS[:1], SamplingParams(max_tokens=4, temperature=0.0), ["plain"], Fixed(3))
    assert simulated.run(models, CARD, 0.1, lambda *_: None).rate("plain") > 0


def test_the_real_work_is_measured_at_every_width(models: Models) -> None:
    real = measure(models.verifier, models.drafter, num_rounds=1)
    assert [*real.verify_s] == [*WIDTHS]
    assert min(real.verify_s.values()) > 0 < real.step_s


def test_the_dilation_makes_the_slowest_work_fit() -> None:
    real = Real({1: CARD.verify_s(1), 8: 20 * CARD.verify_s(8)}, 3 * CARD.step_s)
    assert real.dilation(CARD) == pytest.approx(20 * simulation.MARGIN)
    assert real._replace(step_s=90 * CARD.step_s).dilation(CARD) == pytest.approx(90 * simulation.MARGIN)


@pytest.mark.parametrize(
    ("name", "mode"),
    [("workstation-24gb", "overlapped"), ("workstation-8gb", "overlapped"), ("raspberry-pi-5", "sequential")],
)
def test_auto_overlaps_where_the_sides_share_nothing_and_takes_turns_on_one_processor(name: str, mode: str) -> None:
    assert device_mode(DEVICES[name]) == mode


def test_ratios_are_medians_over_prompts_and_answers_of_one_round_do_not_count() -> None:
    outcome = Outcome(CARD, 1.0)
    outcome.runs = {
        "plain": [Run(10, 10.0, 0, 0), Run(10, 10.0, 0, 0), Run(10, 10.0, 0, 0), Run(0, 0.0, 0, 0)],
        "sequential": [Run(10, 5.0, 8, 4), Run(10, 1.0, 2, 2), Run(10, 2.5, 0, 0), Run(0, 0.0, 0, 0)],
    }
    assert outcome.ratio("sequential", "plain") == 4.0
    assert outcome.rate("sequential") == pytest.approx(30 / 8.5)
    assert outcome.acceptance("sequential") == 0.6
    assert not outcome.spoiled
    outcome.late = 2 * MAX_LATE
    assert outcome.spoiled
    assert outcome.as_dict()["spoiled"] is True


def test_nothing_drafted_and_nothing_timed_is_zero() -> None:
    assert acceptance([]) == rate([]) == rate([Run(0, 0.0, 0, 0)]) == 0.0


def test_the_order_rotates() -> None:
    assert [rotated("abc", turn) for turn in range(4)] == [["a", "b", "c"], ["b", "c", "a"], ["c", "a", "b"], [*"abc"]]


def test_lookup_can_be_simulated_and_a_missing_draft_is_named(tiny_gguf: Path, tmp_path: Path) -> None:
    with Models(tiny_gguf, "lookup") as models:
        assert models.drafter.name == "lookup"
        assert measure(models.verifier, models.drafter, num_rounds=1).step_s < 1e-3
        simulated = Simulation(QUESTIONS[:1], SamplingParams(max_tokens=24, temperature=0.0), ["auto"], Fixed(3))
        outcome = simulated.run(models, CARD, 1.0, lambda *_: None)
    assert outcome.rate("auto") > 0
    assert outcome.num_passes <= 25  # the verifier's alone
    with pytest.raises(ModelNotFoundError, match="nowhere"):
        Models(tiny_gguf, tmp_path / "nowhere")


# Prompts


def test_the_built_in_suite_is_there_and_is_thinned_out() -> None:
    questions = read_suite()
    assert len(questions) >= 5
    assert all(question.category and question.prompt for question in questions)
    assert read_suite(every=2) == questions[::2]


def test_a_file_is_read_line_by_line(tmp_path: Path) -> None:
    path = tmp_path / "suite.jsonl"
    path.write_text('{"category": "qa", "turns": ["Who?", "And then?"]}\n\n{"category": "rag", "turns": ["Wo ist ü?"]}')
    assert read_suite(path) == [("qa", "Who?"), ("rag", "Wo ist ü?")]


@pytest.mark.parametrize(
    ("content", "error", "says"),
    [
        (b"", PromptError, "has no prompts"),
        (b"\n \n", PromptError, "has no prompts"),
        (b"{", PromptError, "line 1: got '{'; allowed"),
        (b'{"category": "a", "turns": ["b"]}\n[]', PromptError, "line 2"),
        (b'{"category": "a", "turns": []}', PromptError, "line 1"),
        (b'{"category": "a", "turns": [" "]}', PromptError, "line 1"),
        (b'{"category": 3, "turns": ["b"]}', PromptError, "line 1"),
        (b"[" * 100_000, PromptError, "line 1"),
        (b"\xff\xfe", FileAccessError, "in UTF-8"),
    ],
)
def test_a_bad_suite_is_refused_on_one_line(
    tmp_path: Path, content: bytes, error: type[EdgespecError], says: str
) -> None:
    path = tmp_path / "suite.jsonl"
    path.write_bytes(content)
    with pytest.raises(error, match=says) as caught:
        read_suite(path)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300 + len(str(path))


def test_a_missing_suite_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileAccessError, match="No such file"):
        read_suite(tmp_path / "nowhere.jsonl")
