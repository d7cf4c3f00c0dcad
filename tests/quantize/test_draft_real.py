"""The real starter model, whole: the 8-bit draft says what llama.cpp says."""

from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np
import pytest

from quantize import build_draft
from tests.quantize.reference import Draft, Llama

PROMPT = "<|im_start|>user\nExplain how a bicycle stays upright when it is moving.<|im_end|>\n<|im_start|>assistant\n"
NUM_POSITIONS = 200


@pytest.fixture(scope="module")
def written(starter_gguf: Path) -> tuple[list[int], int]:
    """The prompt and what llama.cpp answers greedily, and where the answer starts."""
    with contextlib.closing(Llama(starter_gguf, num_ctx=512)) as model:
        prompt = model.tokenize(PROMPT)
        tokens = [*prompt, int(model.feed(prompt)[-1].argmax())]
        while len(tokens) < len(prompt) + NUM_POSITIONS:
            tokens.append(int(model.feed(tokens[-1:])[-1].argmax()))
    return tokens, len(prompt)


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.parametrize(("bits", "least", "most_bytes"), [(8, 0.94, 160e6), (4, 0.6, 95e6)])
def test_agreement_and_size(
    bits: int, least: float, most_bytes: float, starter_gguf: Path, written: tuple[list[int], int], tmp_path: Path
) -> None:
    folder = build_draft(starter_gguf, tmp_path / "draft", bits=bits)
    assert sum(path.stat().st_size for path in folder.iterdir()) < most_bytes
    tokens, start = written
    draft = Draft(folder, num_ctx=512)
    proposed = [draft.feed([tokens[:start]], [0])[0].argmax()]
    proposed += [draft.feed([tokens[i : i + 1]], [i])[0].argmax() for i in range(start, len(tokens) - 1)]
    assert np.mean(np.array(proposed) == tokens[start:]) >= least
