"""What a draft is said to take, against what it takes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from quantize.distill.draft_size import draft_bytes
from quantize.draft import build_draft_of
from quantize.source import open_source
from tests.tiny import TinyConfig, write_gguf

SIZES = TinyConfig(num_vocab=4000, width=192, num_hidden=512, num_layers=3)


@pytest.mark.parametrize("block_size", [32, 64, 128])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("tied", "num_head"), [(True, 1000), (False, None), (True, None)])
def test_it_is_what_was_said(tied: bool, num_head: int | None, bits: int, block_size: int, tmp_path: Path) -> None:
    source = open_source(write_gguf(tmp_path / "source.gguf", replace(SIZES, tied=tied)))
    head = None if num_head is None else np.arange(num_head).tolist()
    draft = build_draft_of(
        source, tmp_path / "draft", bits=bits, block_size=block_size, embedding_bits=4, layers=[0, 2], head=head
    )
    said = draft_bytes(source, [0, 2], num_head, bits, 4, block_size)
    assert said == pytest.approx(sum(path.stat().st_size for path in draft.iterdir()), rel=0.02)


@pytest.mark.parametrize(("base", "num_ropes"), [(1e4, 1), (1e6, 2)])
def test_layers_that_rotate_alike_share_their_tables(base: float, num_ropes: int, tmp_path: Path) -> None:
    config = TinyConfig(
        architecture="gemma3", key_length=64, num_layers=7, window=8, num_ctx=20_000, rope_base=base, num_vocab=400
    )
    source = open_source(write_gguf(tmp_path / "source.gguf", config))
    draft = build_draft_of(source, tmp_path / "draft", bits=4, layers=[0, 5])
    said = draft_bytes(source, [0, 5], None, 4, 4, 32)
    assert said == pytest.approx(sum(path.stat().st_size for path in draft.iterdir()), rel=0.02)
    assert said // (4 * 64 * 20_000) == num_ropes
