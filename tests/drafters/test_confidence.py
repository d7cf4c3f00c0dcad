"""A draft ends before a near-tie, where that is lossless, and is otherwise what it would have been."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edgespec.core.ranking import lead
from edgespec.core.sampling import distribution, scores
from edgespec.core.sequence import Draft, SamplingParams
from edgespec.drafters.base import DraftRequest
from edgespec.drafters.lookup import LookupDrafter
from edgespec.drafters.onnx import OnnxDrafter

PROMPT = [1, 70, 80, 90, 75]
GREEDY = SamplingParams(temperature=0.0)
PENALISED = SamplingParams(temperature=0.0, repeat_penalty=1.5, logit_bias=((77, 1.0),))
COUPLED = SamplingParams(temperature=0.7, seed=3)
REJECTION = SamplingParams(temperature=0.7, seed=3, rule="rejection")


def propose(
    drafter: OnnxDrafter,
    params: SamplingParams,
    margin: float,
    num_draft: int = 12,
    end_tokens: frozenset[int] = frozenset(),
) -> Draft:
    (draft,) = drafter.propose([DraftRequest(0, PROMPT, 2, num_draft, params, end_tokens, margin)])
    return draft


@pytest.fixture(params=["own_folder", "trimmed_folder", "usual_folder"])
def drafter(request: pytest.FixtureRequest) -> OnnxDrafter:
    folder: Path = request.getfixturevalue(request.param)
    return OnnxDrafter.open(folder, num_ctx=100, num_threads=1)


@pytest.mark.parametrize("params", [GREEDY, PENALISED, COUPLED])
def test_it_ends_at_the_first_token_that_led_by_less(drafter: OnnxDrafter, params: SamplingParams) -> None:
    whole = propose(drafter, params, 0.0).tokens
    assert len(whole) == 12
    lengths = []
    for margin in (0.02, 0.1, 0.3, 1.0, 3.0, 100.0):
        tokens = propose(drafter, params, margin).tokens
        assert tokens == whole[: len(tokens)]
        lengths.append(len(tokens))
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[-1] < 12
    assert len(set(lengths)) > 2
    assert propose(drafter, params, 0.0).tokens == whole  # the cache is right after a draft that ended early


@pytest.mark.parametrize("params", [GREEDY, PENALISED, COUPLED])
def test_every_token_comes_with_its_lead(drafter: OnnxDrafter, params: SamplingParams) -> None:
    whole = propose(drafter, params, 0.0)
    assert len(whole.confidences) == len(whole.tokens) == 12
    assert min(whole.confidences) >= 0.0
    assert len(set(whole.confidences)) > 2
    assert whole.held_back is None
    assert propose(drafter, params, 0.0, num_draft=5).confidences == pytest.approx(whole.confidences[:5], abs=1e-3)


@pytest.mark.parametrize("params", [GREEDY, PENALISED, COUPLED])
@pytest.mark.parametrize("margin", [0.1, 1.0, 100.0])
def test_the_token_it_ends_before_is_named(drafter: OnnxDrafter, params: SamplingParams, margin: float) -> None:
    whole, cut = propose(drafter, params, 0.0), propose(drafter, params, margin)
    num = len(cut.tokens)
    assert cut.confidences == pytest.approx(whole.confidences[:num], abs=1e-3)
    assert all(confidence >= margin for confidence in cut.confidences)
    if num == len(whole.tokens):
        assert cut.held_back is None
        return
    assert cut.held_back is not None
    assert cut.held_back.token == whole.tokens[num]
    assert cut.held_back.confidence == pytest.approx(whole.confidences[num], abs=1e-3)
    assert cut.held_back.confidence < margin


def test_a_draft_that_ends_for_another_reason_holds_nothing_back(drafter: OnnxDrafter) -> None:
    end = propose(drafter, GREEDY, 0.0).tokens[2]
    for draft in (propose(drafter, GREEDY, 0.0, 3), propose(drafter, GREEDY, 0.0, 12, frozenset({end}))):
        assert draft.held_back is None
        assert len(draft.confidences) == len(draft.tokens) > 0


def test_a_certain_draw_leads_by_infinitely_much(drafter: OnnxDrafter) -> None:
    alone = SamplingParams(temperature=0.7, seed=3, top_k=1)
    assert set(propose(drafter, alone, 5.0, 4).confidences) == {np.inf}


def test_a_drawn_token_is_never_taken_back_under_rule_rejection(drafter: OnnxDrafter) -> None:
    whole, again = propose(drafter, REJECTION, 0.0), propose(drafter, REJECTION, 100.0)
    assert again.tokens == whole.tokens
    assert again.distributions is not None
    assert len(again.distributions) == 12
    assert again.confidences == whole.confidences == ()
    assert again.held_back is None


@pytest.mark.parametrize("params", [GREEDY, COUPLED, REJECTION])
def test_nothing_is_drafted_after_an_end_token(drafter: OnnxDrafter, params: SamplingParams) -> None:
    whole = propose(drafter, params, 0.0)
    end = whole.tokens[4]
    draft = propose(drafter, params, 0.0, end_tokens=frozenset({end}))
    assert draft.tokens == whole.tokens[: whole.tokens.index(end) + 1]
    assert draft.distributions is None or len(draft.distributions) == len(draft.tokens)


def test_the_lookup_drafter_ends_there_too() -> None:
    request = DraftRequest(0, [1, 2, 3, 4, 5, 1, 2], 7, 5, GREEDY, frozenset({4}))
    assert LookupDrafter().propose([request]) == [Draft(7, (3, 4), None, (2.0, 2.0))]


def test_lead_is_the_distance_to_the_next_best() -> None:
    values = np.array([1.0, 4.0, 2.5, -np.inf])
    assert lead(values, 1) == 1.5
    assert lead(np.array([3.0]), 0) == np.inf
    assert lead(np.array([2.0, 2.0]), 0) == 0.0
    assert lead(np.array([5.0, 1.0], dtype=np.float32), 0) == 4.0


def test_scores_are_what_the_coupled_rule_maximises() -> None:
    row = np.random.default_rng(0).standard_normal(50).astype(np.float32)
    dist = distribution(row, COUPLED, [], 0)
    values = scores(dist, COUPLED, 9)
    assert values.shape == dist.ids.shape
    assert not np.array_equal(values, scores(dist, COUPLED, 10))
