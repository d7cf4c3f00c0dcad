"""How a teacher's next tokens are drawn: by its distribution, and at temperature 0 the likeliest despite rounding."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quantize.distill.batch import MIN_P, draw
from quantize.distill.decoder import Decoder
from quantize.source import Source, open_source
from tests.tiny import TinyConfig, write_gguf


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    return open_source(write_gguf(tmp_path_factory.mktemp("teacher") / "tiny.gguf", TinyConfig(num_layers=1)))


@pytest.fixture(scope="module")
def teacher(source: Source) -> Decoder:
    return Decoder.of(source)


def test_draws_follow_the_distribution(teacher: Decoder) -> None:
    with torch.inference_mode():
        hidden = teacher(torch.tensor([[5, 60, 7, 200]]))[0, -1:]
        p = torch.softmax(teacher.logits(hidden)[0] / 0.7, -1)
        p[p < MIN_P * p.max()] = 0
        p /= p.sum()
        num = 4000
        uniforms = ((np.arange(num) + 0.5) / num).tolist()
        drawn = draw(teacher, hidden.expand(num, -1), [0.7] * num, uniforms)
    found = torch.bincount(torch.tensor(drawn), minlength=len(p)) / num
    torch.testing.assert_close(found, p, rtol=0, atol=1.5 / num)
    assert (p > 0).sum() > 3


def test_the_ends_of_the_draw(teacher: Decoder) -> None:
    """0 and nearly 1 are uniform numbers, too, and fall on tokens that have a chance."""
    with torch.inference_mode():
        hidden = teacher(torch.arange(3, 60)[:, None])[:, 0]
        logits = teacher.logits(hidden)
        for uniform in (0.0, 1 - 2.0**-53):
            drawn = torch.tensor(draw(teacher, hidden, [1.0] * len(hidden), [uniform] * len(hidden)))
            chance = torch.softmax(logits, -1)
            assert (chance.gather(1, drawn[:, None])[:, 0] >= MIN_P * chance.amax(1) * 0.999).all()


def test_temperatures_of_a_batch_are_its_rows(source: Source) -> None:
    """Rounding to bfloat16 makes ties; the likeliest is still found."""
    rough = Decoder.of(source, dtype=torch.bfloat16)
    with torch.inference_mode():
        hidden = rough(torch.arange(3, 67)[:, None])[:, 0]
        chosen = draw(rough, hidden, [0.0, 0.5] * 32, [0.3] * 64)
        matrix = rough.embedding if rough.head is None else rough.head
        expected = (hidden.float() @ matrix.float().T).argmax(-1)
    assert chosen[::2] == expected[::2].tolist()
    assert chosen[1::2] != expected[1::2].tolist()
