"""The contract over a fake, a tiny real model, and the starter verifier."""

from __future__ import annotations

import collections.abc as abc
from pathlib import Path

import pytest

from edgespec.verifiers.base import Verifier
from edgespec.verifiers.canary import MODEL
from edgespec.verifiers.llama import LlamaOptions, LlamaVerifier
from tests.fakes import FakeVerifier
from tests.verifiers.contract import VerifierContract


class TestFakeVerifier(VerifierContract):
    @pytest.fixture
    def verifier(self) -> Verifier:
        return FakeVerifier(num_slots=2)


class TestLlamaVerifierTiny(VerifierContract):
    tolerance = 0.05

    @pytest.fixture
    def verifier(self) -> abc.Iterator[Verifier]:
        verifier = LlamaVerifier(LlamaOptions(MODEL, num_threads=1, num_slots=2))
        yield verifier
        verifier.close()


@pytest.mark.model
class TestLlamaVerifierStarter(VerifierContract):
    tolerance = 1.5

    @pytest.fixture
    def verifier(self, starter_gguf: Path) -> abc.Iterator[Verifier]:
        verifier = LlamaVerifier(LlamaOptions(starter_gguf, num_threads=1, num_slots=2, num_ctx=300))
        yield verifier
        verifier.close()
