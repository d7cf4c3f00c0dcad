"""What every verifier must do, real or fake: subclass ``VerifierContract`` with a ``verifier`` fixture.

The fixture's verifier has two slots or more, at least 16 tokens of context and 32 of vocabulary, and is open.
"""

from __future__ import annotations

import numpy as np
import pytest

from edgespec.errors import ClosedError, ParameterError
from edgespec.verifiers.base import Rows, ScoreRequest, Verifier

TOKENS = [5, 9, 2, 7, 7, 1, 30, 3, 11, 8]


def row_at(verifier: Verifier, tokens: list[int], num_rows: int = 1, slot: int = 0) -> Rows:
    (rows,) = verifier.score([ScoreRequest(slot, tokens, num_rows)])
    return rows.copy()


class VerifierContract:
    tolerance = 0.0  # between batch widths, in logits

    def assert_close(self, one: Rows, other: Rows) -> None:
        np.testing.assert_allclose(one, other, rtol=0, atol=self.tolerance)

    @pytest.mark.parametrize("num_rows", [1, 4, len(TOKENS)])
    def test_gives_one_finite_float32_row_per_wanted_token(self, verifier: Verifier, num_rows: int) -> None:
        (rows,) = verifier.score([ScoreRequest(0, TOKENS, num_rows)])
        assert rows.shape == (num_rows, verifier.num_vocab)
        assert rows.dtype == np.float32
        assert np.isfinite(rows).all()

    def test_row_i_follows_the_token_it_belongs_to(self, verifier: Verifier) -> None:
        rows = row_at(verifier, TOKENS, 4)
        for i in range(4):
            self.assert_close(rows[i : i + 1], row_at(verifier, TOKENS[: len(TOKENS) - 3 + i]))

    def test_a_changed_prefix_gives_the_rows_of_the_new_one(self, verifier: Verifier) -> None:
        other = [*TOKENS[:3], 12, 13, 14]
        expected = row_at(verifier, other, 2)
        row_at(verifier, TOKENS, 3)
        self.assert_close(row_at(verifier, other, 2), expected)
        self.assert_close(row_at(verifier, TOKENS[:2]), row_at(verifier, TOKENS, len(TOKENS))[1:2])

    def test_the_same_call_again_gives_the_same_rows(self, verifier: Verifier) -> None:
        first = row_at(verifier, TOKENS, 3)
        self.assert_close(row_at(verifier, TOKENS, 3), first)

    def test_several_slots_in_one_call_do_not_see_each_other(self, verifier: Verifier) -> None:
        lists = [TOKENS, [4, 3, 2]]
        alone = [row_at(verifier, lists[0], 5), row_at(verifier, lists[1], 2)]
        together = verifier.score([ScoreRequest(1, lists[0], 5), ScoreRequest(0, lists[1], 2)])
        for rows, expected in zip(together, alone, strict=True):
            self.assert_close(rows, expected)

    def test_the_context_can_be_filled_to_its_last_token(self, verifier: Verifier) -> None:
        tokens = (TOKENS * verifier.num_ctx)[: verifier.num_ctx]
        assert np.isfinite(row_at(verifier, tokens, 3)).all()

    @pytest.mark.parametrize(
        ("slot", "num_tokens", "num_rows"), [(-1, 5, 1), (99, 5, 1), (0, 0, 1), (0, 5, 0), (0, 5, 6), (0, 10**5, 1)]
    )
    def test_refuses_a_request_outside_its_bounds(
        self, verifier: Verifier, slot: int, num_tokens: int, num_rows: int
    ) -> None:
        with pytest.raises(ParameterError, match="allowed"):
            verifier.score([ScoreRequest(slot, [1] * num_tokens, num_rows)])

    @pytest.mark.parametrize("token", [-1, 10**7])
    def test_refuses_a_token_outside_its_vocabulary(self, verifier: Verifier, token: int) -> None:
        before = row_at(verifier, TOKENS)
        with pytest.raises(ParameterError, match=f"token id: got {token}"):
            verifier.score([ScoreRequest(0, [*TOKENS, token, 3], 1)])
        self.assert_close(row_at(verifier, TOKENS), before)

    def test_refuses_no_request_and_two_for_one_slot(self, verifier: Verifier) -> None:
        for requests in ([], [ScoreRequest(0, [1], 1), ScoreRequest(0, [2], 1)]):
            with pytest.raises(ParameterError, match="slots of one call"):
                verifier.score(requests)

    def test_a_closed_verifier_says_so_and_closes_again(self, verifier: Verifier) -> None:
        verifier.close()
        verifier.close()
        with pytest.raises(ClosedError):
            verifier.score([ScoreRequest(0, TOKENS, 1)])
