"""Speculative output is distributed as the verifier's own: 20,000 runs a setting against the exact joint distribution.

A run commits tokens over several rounds and its first three are counted, so that whatever one round leaves behind for
the next (noise that is used again, penalties, positions) would show. The seeds are 0 to 19,999.
"""

from __future__ import annotations

import collections.abc as abc
import itertools
from collections import Counter
from dataclasses import dataclass, replace

import numpy as np
import pytest
from scipy import stats

from edgespec.core import acceptance
from edgespec.core.acceptance import judge
from edgespec.core.head import Head
from edgespec.core.sampling import Stream, distribution, pick
from edgespec.core.sequence import Distribution, Draft, Rule, SamplingParams
from tests.core import reference

NUM_RUNS = 20_000
NUM_VOCAB = 6
NUM_COUNTED = 3
PROMPT = [1, 2, 2]
OPEN = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)


@dataclass(frozen=True, eq=False)
class Model:
    """A language model whose logits depend on the last two tokens: a table."""

    name: str
    table: np.ndarray
    head: Head | None = None

    def row(self, tokens: list[int]) -> np.ndarray:
        return self.table[tokens[-2], tokens[-1]]

    def rows(self, tokens: list[int], num: int) -> np.ndarray:
        """What follows each of the last ``num`` tokens."""
        return self.table[tokens[-num - 1 : -1], tokens[-num:]]


def random_table(seed: int, width: int = NUM_VOCAB) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal((NUM_VOCAB, NUM_VOCAB, width)) * 1.5).astype(np.float32)


VERIFIER = Model("verifier", random_table(1))
GOOD = Model("good", VERIFIER.table + np.float32(0.3) * random_table(2))
BAD = Model("bad", random_table(3))
# Says only the two tokens that the verifier finds least likely.
DISJOINT = Model(
    "disjoint", np.where(VERIFIER.table.argsort(axis=-1).argsort(axis=-1) < 2, 0, -np.inf).astype(np.float32)
)
TRIMMED = Model("trimmed", random_table(4, 4), Head(np.array([5, 0, 3, 2])))


class Memo:
    """``distribution`` remembering its answers: it is pure, so this changes nothing but the time 20,000 runs take."""

    def __init__(self) -> None:
        self.known: dict[tuple[bytes, tuple[int, ...], int], Distribution] = {}

    def __call__(
        self,
        row: np.ndarray,
        params: SamplingParams,
        tokens: abc.Sequence[int],
        num_prompt: int,
        head: Head | None = None,
    ) -> Distribution:
        key = (row.tobytes(), tuple(tokens), id(head))
        if key not in self.known:
            self.known[key] = distribution(row, params, tokens, num_prompt, head)
        return self.known[key]


@pytest.fixture
def memo(monkeypatch: pytest.MonkeyPatch) -> Memo:
    memo = Memo()
    monkeypatch.setattr(acceptance, "distribution", memo)
    return memo


def propose(model: Model | None, tokens: list[int], length: int, params: SamplingParams, process: Memo) -> Draft:
    """``length`` tokens of a draft model; without one, a fixed guess that carries no distributions."""
    start = len(tokens)
    if model is None:
        return Draft(start, tuple((tokens[-1] + i) % NUM_VOCAB for i in range(length)))
    tokens, dists = list(tokens), []
    for _ in range(length):
        seen = tokens if params.penalised else ()
        dists.append(process(model.row(tokens), params, seen, len(PROMPT), model.head))
        tokens.append(pick(dists[-1], params, len(tokens), Stream.DRAFT))
    return Draft(start, tuple(tokens[start:]), tuple(dists))


def generate(model: Model | None, num: int, length: int, params: SamplingParams, process: Memo) -> tuple[int, ...]:
    """At least ``num`` tokens, speculatively; the first ``num`` of them."""
    tokens = list(PROMPT)
    while len(tokens) < len(PROMPT) + num:
        draft = propose(model, tokens, length, params, process)
        rows = VERIFIER.rows([*tokens, *draft.tokens], length + 1)
        tokens += judge(draft, rows, params, tokens, len(PROMPT)).tokens
    return tuple(tokens[len(PROMPT) :][:num])


def exact(params: SamplingParams) -> dict[tuple[int, ...], float]:
    """The probability of every beginning of ``NUM_COUNTED`` tokens."""
    joint: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(NUM_COUNTED):
        joint = {
            (*output, token): mass * float(prob)
            for output, mass in joint.items()
            for token, prob in enumerate(after([*PROMPT, *output], params))
            if prob > 0
        }
    return joint


def after(tokens: list[int], params: SamplingParams) -> np.ndarray:
    return reference.probabilities(VERIFIER.row(tokens), params, tokens, len(PROMPT))


def p_value(counts: abc.Mapping[tuple[int, ...], int], expected: dict[tuple[int, ...], float]) -> float:
    """Chi-square, cells with fewer than 5 expected pooled; 0 if something impossible was seen."""
    if set(counts) - set(expected):
        return 0.0
    cells = sorted((mass * NUM_RUNS, counts.get(output, 0)) for output, mass in expected.items())
    pooled = [[0.0, 0.0]]
    for mass, count in cells:
        if pooled[-1][0] >= 5:
            pooled.append([0.0, 0.0])
        pooled[-1][0] += mass
        pooled[-1][1] += count
    wanted, seen = np.array(pooled).T
    return float(stats.chisquare(seen, wanted * (NUM_RUNS / wanted.sum())).pvalue)


def run(model: Model | None, params: SamplingParams, memo: Memo, length: int = 3) -> float:
    counts = Counter(generate(model, NUM_COUNTED, length, replace(params, seed=seed), memo) for seed in range(NUM_RUNS))
    return p_value(counts, exact(params))


PENALTIES = {
    "repeat_penalty": 1.3,
    "presence_penalty": 0.4,
    "frequency_penalty": 0.3,
    "logit_bias": ((0, 0.7), (4, -0.5)),
}


EVERYTHING = {"top_k": 4, "top_p": 0.95, "min_p": 0.05, **PENALTIES}


@pytest.mark.parametrize(
    ("rule", "model", "settings"),
    [
        ("rejection", GOOD, {"temperature": 0.3}),
        ("rejection", GOOD, {"temperature": 1.2, **PENALTIES}),
        ("rejection", BAD, {"temperature": 0.8, "top_k": 3}),
        ("rejection", BAD, {"temperature": 0.3, "min_p": 0.02, **PENALTIES}),
        ("rejection", DISJOINT, {"temperature": 1.2, "top_p": 0.8}),
        ("rejection", TRIMMED, {"temperature": 0.8, "min_p": 0.1}),
        ("rejection", TRIMMED, {"temperature": 0.8, **EVERYTHING}),
        ("rejection", None, {"temperature": 1.2, "top_p": 0.9}),
        # Fewer here: any draft gives the very tokens of plain sampling, as the last test of this file shows.
        ("coupled", GOOD, {"temperature": 0.3, "min_p": 0.02, **PENALTIES}),
        ("coupled", BAD, {"temperature": 0.8, "top_k": 3}),
        ("coupled", TRIMMED, {"temperature": 0.8, **EVERYTHING}),
        ("coupled", None, {"temperature": 1.2, "top_p": 0.9}),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_output_is_distributed_as_the_verifier_alone_samples(
    rule: Rule, model: Model | None, settings: dict, memo: Memo
) -> None:
    assert run(model, replace(OPEN, rule=rule, **settings), memo) > 0.001


def test_a_rule_that_always_accepts_fails(memo: Memo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptance, "uniform", lambda *_: 0.0)
    assert run(GOOD, replace(OPEN, rule="rejection"), memo) < 1e-6


def test_a_rule_that_replaces_from_p_fails(memo: Memo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptance, "_residual", lambda p, q: p)
    assert run(BAD, replace(OPEN, rule="rejection"), memo) < 1e-6


def test_noise_shared_by_draft_and_residual_fails(memo: Memo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptance, "pick", lambda dist, params, at, _: pick(dist, params, at, Stream.DRAFT))
    assert run(BAD, replace(OPEN, rule="rejection"), memo) < 1e-6


@pytest.mark.parametrize("settings", [{}, {"top_k": 3, "top_p": 0.9}, PENALTIES, {"temperature": 0.0}])
def test_coupled_gives_the_same_tokens_with_any_draft_of_any_length(settings: dict) -> None:
    params = replace(OPEN, rule="coupled", **settings)
    for seed in range(20):
        params = replace(params, seed=seed)
        plain = generate(None, 24, 0, params, distribution)
        for model, length in itertools.product((GOOD, BAD, DISJOINT, TRIMMED, None), (1, 3, 8)):
            assert generate(model, 24, length, params, distribution) == plain
