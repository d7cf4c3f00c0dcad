from __future__ import annotations

import collections.abc as abc
from dataclasses import replace

import numpy as np
import pytest

from edgespec.core.acceptance import judge
from edgespec.core.sampling import Stream, distribution, pick
from edgespec.core.sequence import Distribution, Draft, SamplingParams, Verdict
from edgespec.errors import BackendError, ParameterError

GREEDY = SamplingParams(temperature=0.0)
COUPLED = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=3, rule="coupled")
REJECTION = replace(COUPLED, rule="rejection")
EVERY = pytest.mark.parametrize("params", [GREEDY, COUPLED, REJECTION], ids=["greedy", "coupled", "rejection"])


def peaked(*tokens: int, size: int = 8) -> np.ndarray:
    """Rows that leave no doubt which token comes next."""
    rows = np.full((len(tokens), size), -1e6, dtype=np.float32)
    rows[np.arange(len(tokens)), tokens] = 0
    return rows


def random_rows(num: int, size: int = 8, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((num, size)).astype(np.float32)


class Untouchable(abc.Sequence[int]):
    """A token list whose length may be asked for, and nothing else."""

    def __len__(self) -> int:
        return 4000

    def __getitem__(self, index: object) -> int:
        raise AssertionError("the tokens were read")


@EVERY
@pytest.mark.parametrize("rule", ["coupled", "rejection"])
@pytest.mark.parametrize(
    ("drafted", "verdict"),
    [
        ((), Verdict(0, (4,))),
        ((4, 5, 6), Verdict(3, (4, 5, 6, 7))),
        ((4, 5, 1), Verdict(2, (4, 5, 6))),
        ((4, 2, 6), Verdict(1, (4, 5))),
        ((0, 5, 6), Verdict(0, (4,))),
    ],
)
def test_where_there_is_no_doubt_every_rule_agrees(
    params: SamplingParams, rule: str, drafted: tuple[int, ...], verdict: Verdict
) -> None:
    params = params if not params.greedy else replace(params, rule=rule)
    assert judge(Draft(2, drafted), peaked(4, 5, 6, 7)[: len(drafted) + 1], params, [1, 2], 1) == verdict


def test_greedy_ties_go_to_the_lowest_id() -> None:
    rows = np.zeros((2, 5), dtype=np.float32)
    assert judge(Draft(1, (0,)), rows, GREEDY, [1], 1) == Verdict(1, (0, 0))
    assert judge(Draft(1, (1,)), rows, GREEDY, [1], 1) == Verdict(0, (0,))


def test_penalties_see_the_drafted_prefix() -> None:
    rows = np.tile(np.array([2.0, 1.9, 0.0], dtype=np.float32), (4, 1))
    params = replace(GREEDY, frequency_penalty=0.3)
    assert judge(Draft(1, (0, 1, 0)), rows, params, [2], 1) == Verdict(3, (0, 1, 0, 1))
    assert judge(Draft(1, (0, 0, 0)), rows, params, [2], 1) == Verdict(1, (0, 1))
    assert judge(Draft(1, (0, 0, 0)), rows, GREEDY, [2], 1) == Verdict(3, (0, 0, 0, 0))
    assert judge(Draft(2, (1, 0, 1)), rows, params, [2, 0], 1) == Verdict(3, (1, 0, 1, 0))  # one 0 in the output
    assert judge(Draft(2, (0, 1, 0)), rows, params, [2, 0], 2) == Verdict(3, (0, 1, 0, 1))  # and here in the prompt


@EVERY
def test_an_empty_draft_is_plain_sampling(params: SamplingParams) -> None:
    rows = random_rows(1)
    expected = pick(distribution(rows[0], params, (), 1), params, 5, Stream.TARGET)
    assert judge(Draft(5), rows, params, [0] * 5, 1) == Verdict(0, (expected,))


def test_coupled_commits_what_plain_would_whatever_is_drafted() -> None:
    rows = random_rows(4)
    for seed in range(50):
        params = replace(COUPLED, seed=seed)
        plain = [pick(distribution(row, params, (), 1), params, 5 + i, Stream.TARGET) for i, row in enumerate(rows)]
        for num_right in range(4):
            wrong = [(token + 1) % 8 for token in plain]
            drafted = (*plain[:num_right], *wrong[num_right:3])
            assert judge(Draft(5, drafted), rows, params, [0] * 5, 1) == Verdict(
                num_right, tuple(plain[: num_right + 1])
            )


def test_rejection_accepts_everything_when_the_draft_model_is_the_verifier() -> None:
    rows = random_rows(4)
    for seed in range(200):
        params = replace(REJECTION, seed=seed)
        dists = tuple(distribution(row, params, (), 1) for row in rows)
        drafted = tuple(pick(dist, params, 5 + i, Stream.DRAFT) for i, dist in enumerate(dists[:3]))
        bonus = pick(dists[3], params, 8, Stream.TARGET)
        assert judge(Draft(5, drafted, dists[:3]), rows, params, [0] * 5, 1) == Verdict(3, (*drafted, bonus))


def test_rejection_never_accepts_what_the_verifier_would_not_say() -> None:
    params = replace(REJECTION, top_k=2)
    row = np.array([[0, 1, 2, 3], [0, 1, 2, 3]], dtype=np.float32)
    q = Distribution(np.array([0, 1]), np.array([0.5, 0.5]))
    for seed in range(50):
        for drafted in (0, 1):
            verdict = judge(Draft(1, (drafted,), (q,)), row, replace(params, seed=seed), [0], 1)
            assert verdict.accepted == 0
            assert verdict.tokens[0] in (2, 3)


def test_a_rejected_token_is_replaced_by_one_that_the_draft_model_underrates() -> None:
    rows = np.log(np.array([[0.5, 0.3, 0.2]] * 2, dtype=np.float32))
    q = Distribution(np.array([0, 1]), np.array([0.9, 0.1]))  # the residual is 0.2 and 0.2, for 1 and 2
    replaced = [
        verdict.tokens[0]
        for seed in range(4000)
        if (verdict := judge(Draft(1, (0,), (q,)), rows, replace(REJECTION, seed=seed), [0], 1)).accepted == 0
    ]
    assert len(replaced) / 4000 == pytest.approx(1 - 0.5 / 0.9, abs=0.03)
    assert 0 not in replaced
    assert replaced.count(1) / len(replaced) == pytest.approx(0.5, abs=0.05)


def test_an_empty_residual_falls_back_to_the_verifier(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = random_rows(2)
    p = distribution(rows[0], REJECTION, (), 1)
    monkeypatch.setattr("edgespec.core.acceptance.uniform", lambda *_: 1.0)  # rejects even where p equals q
    verdict = judge(Draft(1, (3,), (p,)), rows, REJECTION, [0], 1)
    assert verdict == Verdict(0, (pick(p, REJECTION, 1, Stream.TARGET),))


@EVERY
def test_rows_are_read_up_to_the_first_rejection(params: SamplingParams) -> None:
    rows = peaked(4, 5, 6, 7)
    rows[2:] = np.nan
    assert judge(Draft(1, (4, 0, 6)), rows, params, [0], 1) == Verdict(1, (4, 5))
    with pytest.raises(BackendError):
        judge(Draft(1, (4, 5, 6)), rows, params, [0], 1)


@EVERY
def test_tokens_are_read_for_penalties_only(params: SamplingParams) -> None:
    judge(Draft(4000, (4,)), peaked(4, 5), params, Untouchable(), 10)
    with pytest.raises(AssertionError, match="were read"):
        judge(Draft(4000, (4,)), peaked(4, 5), replace(params, presence_penalty=0.1), Untouchable(), 10)


@EVERY
def test_nothing_is_mutated(params: SamplingParams) -> None:
    rows, tokens = random_rows(3), [1, 2, 3]
    before = rows.copy()
    params = replace(params, repeat_penalty=1.3, logit_bias=((2, 1.0),))
    judge(Draft(3, (1, 2)), rows, params, tokens, 1)
    assert np.array_equal(rows, before)
    assert tokens == [1, 2, 3]


@EVERY
def test_parts_that_do_not_fit_are_refused(params: SamplingParams) -> None:
    for draft, num_rows, tokens in (
        (Draft(2, (1,)), 2, [0]),
        (Draft(1, (1,)), 1, [0]),
        (Draft(1, (1,)), 3, [0]),
        (Draft(1, (1, 2), (Distribution(np.array([1]), np.ones(1)),)), 3, [0]),
    ):
        with pytest.raises(ParameterError, match="draft of"):
            judge(draft, random_rows(num_rows), params, tokens, 1)


def test_a_token_that_its_own_distribution_excludes_is_refused() -> None:
    q = Distribution(np.array([1, 2]), np.array([0.5, 0.5]))
    for token in (0, 3):
        with pytest.raises(ParameterError, match=f"draft token {token}"):
            judge(Draft(1, (token,), (q,)), random_rows(2), REJECTION, [0], 1)


@pytest.mark.parametrize("params", [COUPLED, REJECTION])
@pytest.mark.parametrize("drafted", [(), (1,)])
def test_sampling_needs_a_seed(params: SamplingParams, drafted: tuple[int, ...]) -> None:
    with pytest.raises(ParameterError, match="seed"):
        judge(Draft(1, drafted), random_rows(len(drafted) + 1), replace(params, seed=None), [0], 1)
