from __future__ import annotations

import math
from dataclasses import FrozenInstanceError, replace

import pytest

from edgespec.core.sequence import MAX_SEED, RULES, Draft, Round, SamplingParams, Sequence
from edgespec.errors import ParameterError

PARAMS = SamplingParams(max_tokens=None)


def sequence(num_ctx: int = 100, max_tokens: int | None = None, end_tokens: tuple[int, ...] = ()) -> Sequence:
    return Sequence([1, 2, 3], SamplingParams(max_tokens=max_tokens), num_ctx, frozenset(end_tokens))


# SamplingParams


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("max_tokens", value) for value in (0, -1, 1.5, True, "3")],
        *[("top_k", value) for value in (-1, 2.0, False)],
        *[("seed", value) for value in (-1, MAX_SEED + 1, 0.5, True)],
        *[("temperature", value) for value in (-0.1, math.nan, math.inf, "1", None, True)],
        *[("top_p", value) for value in (0.0, -0.5, 1.01, math.nan)],
        *[("min_p", value) for value in (-0.01, 1.01, math.nan)],
        *[("repeat_penalty", value) for value in (0.0, -1.0, math.nan, math.inf)],
        *[("presence_penalty", value) for value in (math.nan, -math.inf)],
        *[("frequency_penalty", value) for value in (math.nan, math.inf)],
        *[("logit_bias", value) for value in (((-1, 0.0),), ((1, math.nan),), ((1, math.inf),), ((1.0, 1.0),))],
        *[("stop", value) for value in (("",), ("a", ""), (1,))],
        *[("rule", value) for value in ("greedy", "", None)],
    ],
)
def test_a_value_outside_its_range_is_refused_in_one_line_that_names_it(name: str, value: object) -> None:
    with pytest.raises(ParameterError) as caught:
        SamplingParams(**{name: value})
    message = str(caught.value)
    assert message.startswith(name)
    assert "got" in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("max_tokens", value) for value in (None, 1, 10**9)],
        *[("top_k", value) for value in (0, 1, 10**9)],
        *[("seed", value) for value in (None, 0, MAX_SEED)],
        *[("temperature", value) for value in (0, 0.0, 1, 1e300, 5e-324)],
        *[("top_p", value) for value in (1, 1.0, 1e-300)],
        *[("min_p", value) for value in (0, 0.0, 1.0)],
        *[("repeat_penalty", value) for value in (1, 0.5, 2.0)],
        *[("presence_penalty", value) for value in (-2.0, 0, 2.0)],
        ("logit_bias", ((0, -100), (5, 1.5))),
        ("stop", ("\n", "END")),
        *[("rule", value) for value in RULES],
    ],
)
def test_the_ends_of_each_range_are_allowed(name: str, value: object) -> None:
    assert getattr(SamplingParams(**{name: value}), name) == value


def test_params_are_frozen_and_checked_again_when_replaced() -> None:
    with pytest.raises(FrozenInstanceError):
        PARAMS.top_k = 3  # type: ignore[misc]
    with pytest.raises(ParameterError):
        replace(PARAMS, top_k=-1)


def test_greedy_and_penalised() -> None:
    assert SamplingParams(temperature=0).greedy
    assert not PARAMS.greedy
    assert not PARAMS.penalised
    for change in (
        {"repeat_penalty": 1.1},
        {"presence_penalty": -0.1},
        {"frequency_penalty": 0.1},
        {"logit_bias": ((1, 0.5),)},
    ):
        assert replace(PARAMS, **change).penalised


# Sequence


def test_a_sequence_counts_prompt_and_output() -> None:
    it = sequence()
    assert (it.num_prompt, it.num_output) == (3, 0)
    assert it.extend([4, 5]) == (4, 5)
    assert (it.num_prompt, it.num_output, it.tokens) == (3, 2, [1, 2, 3, 4, 5])
    assert it.finish_reason is None


def test_room_is_what_context_and_max_tokens_leave() -> None:
    assert sequence(num_ctx=10).room == 7
    assert sequence(num_ctx=10, max_tokens=5).room == 5
    assert sequence(num_ctx=10, max_tokens=50).room == 7
    assert sequence(num_ctx=2).room == 0
    it = sequence(num_ctx=10, max_tokens=5)
    it.extend([4, 5])
    assert it.room == 3


@pytest.mark.parametrize(("num_ctx", "max_tokens"), [(5, None), (100, 2), (5, 2)])
def test_the_end_of_the_room_cuts_and_finishes(num_ctx: int, max_tokens: int | None) -> None:
    it = sequence(num_ctx, max_tokens)
    assert it.extend([4, 5, 6]) == (4, 5)
    assert it.tokens == [1, 2, 3, 4, 5]
    assert it.finish_reason == "length"
    assert it.extend([6]) == ()


@pytest.mark.parametrize("place", range(4))
def test_nothing_after_an_end_token_is_kept(place: int) -> None:
    run = [4, 5, 6, 7]
    run[place] = 9
    it = sequence(end_tokens=(8, 9))
    assert it.extend(run) == tuple(run[: place + 1])
    assert it.tokens == [1, 2, 3, *run[: place + 1]]
    assert it.finish_reason == "stop"


def test_an_end_token_that_fills_the_room_is_a_stop() -> None:
    it = sequence(max_tokens=2, end_tokens=(9,))
    assert it.extend([4, 9, 5]) == (4, 9)
    assert it.finish_reason == "stop"


def test_an_end_token_beyond_the_room_is_not_seen() -> None:
    it = sequence(max_tokens=2, end_tokens=(9,))
    it.extend([4, 5, 9])
    assert it.finish_reason == "length"


def test_an_end_token_in_the_prompt_ends_nothing() -> None:
    it = sequence(end_tokens=(1, 3))
    it.extend([4])
    assert it.finish_reason is None


def test_cut_drops_the_last_tokens_and_stops() -> None:
    it = sequence()
    it.extend([4, 5, 6])
    it.cut(2)
    assert (it.tokens, it.finish_reason) == ([1, 2, 3, 4], "stop")
    it.cut(0)
    assert it.tokens == [1, 2, 3, 4]


def test_a_round_counts_what_was_drafted() -> None:
    assert Round((4, 5), Draft(3, (4, 6, 7)), accepted=1).drafted == 3
    assert Round((4,), Draft(3)).drafted == 0
