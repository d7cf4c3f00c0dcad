from __future__ import annotations

import collections.abc as abc
from pathlib import Path

import numpy as np
import pytest

from edgespec.errors import ModelNotFoundError
from edgespec.verifiers.base import Rows, ScoreRequest
from tests import tiny
from tests.bench import widths


class RecordingVerifier:
    num_vocab, num_ctx, num_slots = 320, 256, 1

    def __init__(self) -> None:
        self.requests: list[ScoreRequest] = []

    def score(
        self, requests: abc.Sequence[ScoreRequest], cancelled: abc.Callable[[], bool] = lambda: False
    ) -> list[Rows]:
        self.requests += requests
        return [np.zeros((request.num_rows, self.num_vocab), np.float32) for request in requests]

    def close(self) -> None: ...


def test_every_width_is_scored_after_the_same_prefix_in_changing_order() -> None:
    verifier = RecordingVerifier()
    measured = widths.measure(verifier, (1, 3, 8), num_ctx=20, num_rounds=5)
    assert [*measured] == [1, 3, 8]
    assert all(seconds > 0 for seconds in measured.values())
    resets, timed = verifier.requests[::2], verifier.requests[1::2]
    assert len(timed) == (5 + 1) * 3
    assert {(tuple(reset.tokens), reset.num_rows) for reset in resets} == {(tuple(resets[0].tokens), 1)}
    assert all(list(request.tokens[:20]) == list(resets[0].tokens) for request in timed)
    assert all(len(request.tokens) == 20 + request.num_rows for request in timed)
    rounds = [tuple(request.num_rows for request in timed[i : i + 3]) for i in range(0, len(timed), 3)]
    assert {tuple(sorted(order)) for order in rounds} == {(1, 3, 8)}
    assert len(set(rounds)) > 1


def test_the_table_is_in_milliseconds() -> None:
    assert widths.table({"m": {1: 0.0887, 32: 0.5844}}) == "| model | 1 | 32 |\n| --- | --- | --- |\n| m | 88.7 | 584 |"


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tiny.write_gguf(tmp_path / "tiny.gguf")
    assert widths.main([str(path), "--rounds", "1", "--threads", "1", "--context", "16", "--no-extra-bufts"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "| model | 1 | 2 | 3 | 4 | 5 | 6 | 8 | 12 | 16 | 32 |"
    assert lines[2].startswith("| tiny | ")
    assert widths.main([str(tmp_path / "missing.gguf")]) == ModelNotFoundError.exit_code
