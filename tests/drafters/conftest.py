"""Tiny draft models in both forms, with the same weights, made once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from quantize import build_draft
from tests.tiny import TinyConfig, write_gguf, write_usual_onnx

TINY = TinyConfig()
HEAD = np.random.default_rng(5).permutation(TINY.num_vocab)[:100]


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", TINY)


@pytest.fixture(scope="session")
def own_folder(tiny_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft folder of full precision."""
    return build_draft(tiny_gguf, tmp_path_factory.mktemp("own") / "draft", bits=32)


@pytest.fixture(scope="session")
def trimmed_folder(tiny_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with a head of 100 tokens."""
    return build_draft(tiny_gguf, tmp_path_factory.mktemp("trimmed") / "draft", bits=32, head=HEAD.tolist())


@pytest.fixture(scope="session")
def usual_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model as exporters write it."""
    return write_usual_onnx(tmp_path_factory.mktemp("usual") / "export", TINY).parent
