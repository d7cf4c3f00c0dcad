"""Fixtures for every test: a cache of their own, tiny real models, the starter pair."""

from __future__ import annotations

import collections.abc as abc
import signal
from pathlib import Path

import pytest

from edgespec.pairs import load_pair
from quantize import build_draft
from tests.tiny import write_gguf, write_usual_onnx


@pytest.fixture(scope="session", autouse=True)
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> abc.Iterator[Path]:
    """A cache folder of the tests' own, for them and for the commands they start; a data folder beside it."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EDGESPEC_CACHE_DIR", str(folder))
        patch.setenv("EDGESPEC_DATA_DIR", str(tmp_path_factory.mktemp("data")))
        yield folder


@pytest.fixture(autouse=True)
def signals() -> abc.Iterator[None]:
    """What the command line does with signals is its own: a test run that is told to end has to end."""
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture(scope="session")
def own_folder(tiny_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model as a draft folder of full precision."""
    return build_draft(tiny_gguf, tmp_path_factory.mktemp("own") / "draft", bits=32)


@pytest.fixture(scope="session")
def usual_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model as exporters write it."""
    return write_usual_onnx(tmp_path_factory.mktemp("usual") / "export").parent


@pytest.fixture(scope="session")
def starter_gguf() -> Path:
    """The starter verifier. Where it is not installed the error says how to get it."""
    return load_pair("starter").verifier.find()


@pytest.fixture(scope="session")
def starter_draft(starter_gguf: Path) -> Path:
    """The starter pair's draft model, built once for all tests as a user's first run builds it."""
    return load_pair("starter").ensure_draft()
