"""A draft model whose head is cut, made once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from quantize import build_draft
from tests.tiny import TinyConfig

TINY = TinyConfig()
HEAD = np.random.default_rng(5).permutation(TINY.num_vocab)[:100]


@pytest.fixture(scope="session")
def trimmed_folder(tiny_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model as a draft folder of full precision with a head of 100 tokens."""
    return build_draft(tiny_gguf, tmp_path_factory.mktemp("trimmed") / "draft", bits=32, head=HEAD.tolist())
