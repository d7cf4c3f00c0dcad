"""The lossless check over verifiers that round differently by width, and over outputs that are wrong."""

from __future__ import annotations

import collections.abc as abc
from typing import Any

import numpy as np
import pytest

from edgespec.core.policy import Fixed
from edgespec.core.sequence import Draft, SamplingParams, Sequence, Verdict
from edgespec.engine import rounds as helpers
from edgespec.engine.loops import plain
from edgespec.engine.lossless import check
from edgespec.errors import ParameterError
from edgespec.verifiers.base import Cancelled, Rows, ScoreRequest, never
from tests.engine.running import sequential
from tests.fakes import FakeDrafter, FakeVerifier, random_logits

GREEDY = SamplingParams(max_tokens=50, temperature=0.0)
SAMPLED = SamplingParams(max_tokens=50, temperature=0.8, seed=5)


class Rounding(FakeVerifier):
    """Rows differ a little by batch width, as real kernels' do, and some logits are nearly tied."""

    def score(self, requests: abc.Sequence[ScoreRequest], cancelled: Cancelled = never) -> list[Rows]:
        found = super().score(requests, cancelled)
        for request, rows in zip(requests, found, strict=True):
            np.round(rows, 1, out=rows)
            for i, row in enumerate(rows):
                position = len(request.tokens) - request.num_rows + i
                rng = np.random.default_rng([request.num_rows, position])
                row += 0.1 * rng.standard_normal(len(row), dtype=np.float32)
        return found


def generate(params: SamplingParams, verifier: FakeVerifier) -> tuple[Sequence, list[Draft]]:
    one = Sequence([1, 2, 3], params, 64)
    rounds = list(sequential(one, FakeDrafter(), verifier, Fixed(4)))
    return one, [round_.draft for round_ in rounds]


@pytest.mark.parametrize("params", [GREEDY, SAMPLED])
def test_nothing_is_found_where_nothing_differs(params: SamplingParams) -> None:
    one, drafts = generate(params, FakeVerifier())
    assert check(one, drafts, FakeVerifier()) == []


@pytest.mark.parametrize("params", [GREEDY, SAMPLED])
def test_near_ties_are_found_and_explained(params: SamplingParams) -> None:
    verifier = Rounding()
    one, drafts = generate(params, verifier)
    found = check(one, drafts, verifier)
    assert found
    assert all(d.explained and 0 < d.difference < 1 and d.width > 1 for d in found)
    assert all(d.margin is None or 0 < d.margin <= 2 * d.difference for d in found)
    reference = Sequence([1, 2, 3], params, 64)
    list(plain(reference, verifier))
    first = found[0].position
    output, expected = one.tokens[3:], reference.tokens[3:]
    assert output[:first] == expected[:first]
    assert (output[first], expected[first]) == (found[0].token, found[0].plain_token)


class Unrelated(FakeVerifier):
    """Rows of wide batches come from another model: a cache gone wrong, say."""

    def score(self, requests: abc.Sequence[ScoreRequest], cancelled: Cancelled = never) -> list[Rows]:
        found = super().score(requests, cancelled)
        other = random_logits(32, 77)
        for request, rows in zip(requests, found, strict=True):
            for i in range(len(rows) if len(rows) > 1 else 0):
                rows[i] = other(request.tokens[: len(request.tokens) - len(rows) + 1 + i])
        return found


@pytest.mark.parametrize("params", [GREEDY, SAMPLED])
def test_wrong_rows_do_not_explain_themselves(params: SamplingParams) -> None:
    verifier = Unrelated()
    one, drafts = generate(params, verifier)
    found = check(one, drafts, verifier)
    assert len(found) > 5
    assert not any(divergence.explained for divergence in found)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED])
def test_a_wrong_token_has_no_explanation(params: SamplingParams) -> None:
    one, drafts = generate(params, FakeVerifier())
    place = len(one.tokens) - 1
    one.tokens[place] = (one.tokens[place] + 1) % 32
    (found,) = check(one, drafts, FakeVerifier())
    assert not found.explained
    assert found.position == place - 3
    assert "NOT explained" in str(found)


def test_a_biased_acceptance_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accepting everything a bad draft proposes is noticed at every place it matters."""
    honest = helpers.judge

    def biased(draft: Draft, rows: Rows, *rest: Any) -> Verdict:
        return Verdict(len(draft.tokens), (*draft.tokens, *honest(Draft(draft.start), rows[-1:], *rest).tokens))

    monkeypatch.setattr(helpers, "judge", biased)
    one = Sequence([1, 2, 3], GREEDY, 64)
    rounds = list(sequential(one, FakeDrafter(logits=random_logits(32, 9)), FakeVerifier(), Fixed(4)))
    found = check(one, [round_.draft for round_ in rounds], FakeVerifier())
    assert len(found) > 20
    assert not any(divergence.explained for divergence in found)


def test_rule_rejection_cannot_be_checked_when_sampling() -> None:
    one = Sequence([1], SamplingParams(temperature=0.8, seed=1, rule="rejection"), 64)
    with pytest.raises(ParameterError, match="use rule coupled"):
        check(one, [], FakeVerifier())
