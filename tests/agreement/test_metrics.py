"""Positions in numbers, against plain formulas over random rows."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from scipy.special import log_softmax

from edgespec.agreement.metrics import NUM_DRAWS, Shared, Tally, overlap, position_tally
from edgespec.agreement.result import TEMPERATURE, TOP_K, Agreement
from edgespec.core.head import Head
from edgespec.core.sequence import Distribution
from edgespec.errors import BackendError

NUM_SOURCE, NUM_POSITIONS = 300, 400
RANDOM = np.random.default_rng(3)
SOURCE = (3 * RANDOM.standard_normal((NUM_POSITIONS, NUM_SOURCE))).astype(np.float32)
NOISE = RANDOM.standard_normal((NUM_POSITIONS, NUM_SOURCE)).astype(np.float32)
TOKENS = RANDOM.integers(0, NUM_SOURCE, NUM_POSITIONS)
# What the columns of a subject stand for: everything, in order; padding more or less; some ids in no order, and one
# that the source does not have.
HEADS = {
    "whole": np.arange(NUM_SOURCE),
    "narrower": np.arange(NUM_SOURCE - 20),
    "wider": np.arange(NUM_SOURCE + 50),
    "trimmed": np.append(RANDOM.permutation(NUM_SOURCE)[:120], NUM_SOURCE + 7),
}


def subject_rows(ids: np.ndarray) -> np.ndarray:
    """The source's logits with noise, and high ones for what the source does not have."""
    known = np.concatenate([SOURCE + NOISE, np.full((NUM_POSITIONS, 60), 50, np.float32)], axis=1)
    return known[:, ids]


def tallied(name: str) -> Tally:
    ids = HEADS[name]
    shared = Shared(NUM_SOURCE, len(ids), Head(ids) if name == "trimmed" else None)
    total = Tally()
    for i, (source, subject) in enumerate(zip(SOURCE, subject_rows(ids), strict=True)):
        total.add(position_tally(source, subject, int(TOKENS[i]), i, shared))
    return total


def dense(row: np.ndarray) -> np.ndarray:
    """Probabilities at the temperature, of the top-k."""
    kept = np.argsort(-row, kind="stable")[:TOP_K]
    probs = np.zeros(len(row))
    probs[kept] = np.exp(row[kept].astype(float) / TEMPERATURE)
    return probs / probs.sum()


@pytest.mark.parametrize("name", HEADS)
def test_averages_are_those_of_the_formulas(name: str) -> None:
    scores = tallied(name).scores()
    ids = HEADS[name][HEADS[name] < NUM_SOURCE]
    subject = np.full((NUM_POSITIONS, NUM_SOURCE), -np.inf)
    subject[:, ids] = subject_rows(ids)
    p, q = log_softmax(SOURCE[:, ids].astype(float), axis=1), log_softmax(subject[:, ids], axis=1)
    assert scores.num_positions == NUM_POSITIONS
    assert scores.agreement == (SOURCE.argmax(1) == subject.argmax(1)).mean()
    assert scores.kl == pytest.approx((np.exp(p) * (p - q)).sum(1).mean(), rel=1e-9)
    covered = np.isin(TOKENS, ids)
    at = np.arange(NUM_POSITIONS)[covered], TOKENS[covered]
    losses = {
        "source_perplexity": log_softmax(SOURCE.astype(float), axis=1)[at],
        "subject_perplexity": log_softmax(subject, axis=1)[at],
    }
    assert scores.coverage == covered.mean()
    for key, values in losses.items():
        assert getattr(scores, key) == pytest.approx(math.exp(-values.mean()), rel=1e-9)
    accepted = [np.minimum(dense(a), dense(b)).sum() for a, b in zip(SOURCE, subject, strict=True)]
    assert scores.rejection == pytest.approx(np.mean(accepted), rel=1e-6)


@pytest.mark.parametrize("name", HEADS)
def test_draws_match_as_often_as_coupled_noise_makes_them(name: str) -> None:
    """Both argmaxes fall on i with probability 1 / sum over j of max(p_j / p_i, q_j / q_i)."""
    ids = HEADS[name][HEADS[name] < NUM_SOURCE]
    subject = np.full((NUM_POSITIONS, NUM_SOURCE), -np.inf)
    subject[:, ids] = subject_rows(ids)
    expected = []
    for source_row, subject_row in zip(SOURCE, subject, strict=True):
        p, q = dense(source_row), dense(subject_row)
        both = np.flatnonzero((p > 0) & (q > 0))
        expected.append(sum(1 / np.maximum(p / p[i], q / q[i]).sum() for i in both))
    deviation = math.sqrt(np.mean(np.array(expected) * (1 - np.array(expected))) / (NUM_POSITIONS * NUM_DRAWS))
    assert tallied(name).scores().coupled == pytest.approx(np.mean(expected), abs=4 * deviation)
    assert deviation < 0.015


def test_a_model_stands_for_itself() -> None:
    shared, total = Shared(NUM_SOURCE, NUM_SOURCE, None), Tally()
    for i, row in enumerate(SOURCE):
        total.add(position_tally(row, row, int(TOKENS[i]), i, shared))
    scores = total.scores()
    assert (scores.agreement, scores.kl, scores.coverage, scores.coupled) == (1.0, 0.0, 1.0, 1.0)
    assert scores.rejection == pytest.approx(1.0)
    assert scores.subject_perplexity == scores.source_perplexity


def test_rows_are_not_changed() -> None:
    source, subject = SOURCE[0].copy(), subject_rows(HEADS["trimmed"])[0].copy()
    before = source.copy(), subject.copy()
    position_tally(source, subject, 5, 0, Shared(NUM_SOURCE, len(subject), Head(HEADS["trimmed"])))
    assert np.array_equal(source, before[0])
    assert np.array_equal(subject, before[1])


def test_of_equal_logits_the_lowest_id_wins_on_both_sides() -> None:
    flat, d2t = np.zeros(8, np.float32), np.array([7, 3, 0])
    tally = position_tally(flat, np.zeros(3, np.float32), 3, 0, Shared(8, 3, Head(d2t)))
    assert tally.num_agreed == 1
    assert tally.subject_loss == pytest.approx(math.log(3))
    assert tally.source_loss == pytest.approx(math.log(8))


def test_what_is_ruled_out() -> None:
    row, banned = np.zeros(4, np.float32), np.array([0, 0, 0, -np.inf], np.float32)
    shared = Shared(4, 4, None)
    assert position_tally(row, banned, 0, 0, shared).kl == math.inf  # the subject rules out what the source does not
    assert position_tally(banned, row, 0, 0, shared).kl == pytest.approx(math.log(4 / 3))
    assert position_tally(banned, banned, 3, 0, shared).subject_loss == math.inf
    all_banned = np.array([-np.inf, 0], np.float32)  # the source rules out all that the subject can say
    tally = position_tally(all_banned, np.zeros(1, np.float32), 0, 0, Shared(2, 1, None))
    assert (tally.num_agreed, tally.kl, tally.source_loss, tally.rejection) == (0, 0.0, math.inf, 0.0)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("side", [0, 1])
def test_broken_rows(value: float, side: int) -> None:
    rows = [np.zeros(4, np.float32), np.zeros(4, np.float32)]
    rows[side][2] = value
    with pytest.raises(BackendError, match="needs a finite one and no NaN"):
        position_tally(rows[0], rows[1], 0, 0, Shared(4, 4, None))


def test_overlap() -> None:
    p = Distribution(np.array([1, 4, 9]), np.array([0.5, 0.3, 0.2]))
    q = Distribution(np.array([0, 4, 9, 12]), np.array([0.1, 0.6, 0.1, 0.2]))
    assert overlap(p, q) == pytest.approx(0.4)
    assert overlap(p, Distribution(np.array([2]), np.ones(1))) == 0.0


def agreement(tally: Tally, num_head_vocab: int | None = None, subject_ms: float | None = 1.5) -> Agreement:
    scores = tally.scores()
    paths = {"subject": Path("folder/draft"), "source": Path("folder/source.gguf")}
    sizes = {"subject_bytes": 5_000_000, "source_bytes": 10_000_000, "num_texts": 2, "num_threads": 2}
    return Agreement(
        **paths,
        **sizes,
        total=scores,
        by_category={"prose": scores, "code": scores},
        num_head_vocab=num_head_vocab,
        subject_ms=subject_ms,
        source_ms=12.0,
    )


def test_a_result_is_ready_for_json() -> None:
    content = json.loads(json.dumps(agreement(Tally(2, 1, 0, math.inf)).as_dict(), allow_nan=False))
    assert (content["subject"], content["source"]) == (str(Path("folder/draft")), str(Path("folder/source.gguf")))
    assert (content["agreement"], content["kl"], content["subject_perplexity"]) == (0.5, None, None)
    assert (content["temperature"], content["top_k"], content["subject_ms"]) == (0.8, 40, 1.5)
    assert content["by_category"]["code"]["coverage"] == 0.0
    assert content["by_category"].keys() == {"prose", "code"}


def test_a_result_is_a_table() -> None:
    lines = agreement(Tally(4, 3, 4, 1.0, 4.0, 4.0, 3.2, 3.0)).lines()
    assert lines[0] == "draft against source.gguf"
    assert [line.split() for line in lines[2:5]] == [
        [name, "4", "0.750", "0.2500", "2.72", "2.72", "0.800", "0.750", "100.0%"] for name in ("prose", "code", "all")
    ]
    assert len({len(line) for line in lines[1:5]}) == 1
    assert lines[5:7] == ["size 5.0 MB, source 10.0 MB (0.50 x)", "1.50 ms a token on 2 threads, source 12.00 ms"]
    assert "renormalised" not in "".join(lines)


def test_a_table_says_what_a_trimmed_head_changes() -> None:
    lines = agreement(Tally(4, 3, 2), num_head_vocab=8192, subject_ms=None).lines()
    assert "the subject can say 8192 ids: KL is over these, renormalised" in lines[-1]
    assert not any("ms a token" in line for line in lines)
