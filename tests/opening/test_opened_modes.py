"""The same tokens in every mode, alone and among others, over tiny real models: llama.cpp and ONNX Runtime."""

from __future__ import annotations

import collections.abc as abc
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edgespec.core.policy import Fixed, Goodput, Threshold
from edgespec.core.sequence import Ahead, Round, SamplingParams, Sequence
from edgespec.devices.profile import Speculation
from edgespec.engine.look_ahead import LookAhead
from edgespec.engine.lossless import _margin
from edgespec.runtime import Runtime
from edgespec.verifiers.base import ScoreRequest
from quantize import build_draft
from tests.opening.pairs import CPU, open_auto, params
from tests.tiny import TinyConfig, write_gguf

PROMPTS = ("the cat and the hat", "in the sea", "andering " * 5, "once upon a time")
MODES = ("plain", "sequential", "overlapped", "auto")
NEAR = 0.01  # logits: what different batches round differently


@pytest.fixture(scope="module")
def noisy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft model that is right about half of the time."""
    folder = tmp_path_factory.mktemp("noisy")
    return build_draft(write_gguf(folder / "noisy.gguf", TinyConfig(noise=0.05)), folder / "draft", bits=32)


def assert_plains(runtime: Runtime, prompt: str, asked: SamplingParams, got: tuple[int, ...]) -> None:
    """The tokens of plain decoding; a random model is full of near-ties, and at one of those they may part."""
    plain = runtime.generate(prompt, asked, mode="plain").tokens
    assert len(got) == len(plain)
    first = next((i for i, pair in enumerate(zip(got, plain, strict=True)) if pair[0] != pair[1]), None)
    if first is not None:
        sequence = Sequence(runtime.encode(prompt), asked, runtime.num_ctx)
        sequence.extend(plain[:first])
        position = len(sequence.tokens)
        row = on_owner(runtime, lambda: score(runtime, [*sequence.tokens]))
        margin = _margin(row, sequence, position, plain[first], got[first])
        assert margin is not None
        assert margin < NEAR


def score(runtime: Runtime, tokens: list[int]) -> Any:
    """The last token's row."""
    return runtime._verifier.score([ScoreRequest(0, tokens, 1)])[0][0].copy()


def on_owner(runtime: Runtime, call: abc.Callable[[], Any]) -> Any:
    return runtime._service._owner.submit(call).result()


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("policy", [Fixed(1), Fixed(5), Threshold(4), Goodput()])
@pytest.mark.parametrize("kind", ["own_folder", "noisy"])
def test_overlapped_gives_plains_tokens(
    tiny_gguf: Path, request: pytest.FixtureRequest, kind: str, policy: Any, temperature: float
) -> None:
    with open_auto(tiny_gguf, request.getfixturevalue(kind), mode="overlapped", policy=policy) as runtime:
        for prompt in PROMPTS[:3]:
            asked = params(temperature)
            found = runtime.generate(prompt, asked)
            assert_plains(runtime, prompt, asked, found.tokens)
            assert found.stats.mode == "overlapped"
            assert found.stats.hidden_s <= found.stats.draft_s
            assert found.stats.drafted > 0 or isinstance(policy, Goodput)
        assert runtime.degraded.steps == ()


@pytest.fixture
def outcomes(monkeypatch: pytest.MonkeyPatch) -> list[Ahead | None]:
    """Of each round's look-ahead."""
    found: list[Ahead | None] = []
    judge = LookAhead.judge

    def noted(self: LookAhead, round_: Round) -> Round:
        found.append(judge(self, round_).ahead)
        return replace(round_, ahead=found[-1])

    monkeypatch.setattr(LookAhead, "judge", noted)
    return found


@pytest.mark.parametrize(("steps", "kept"), [(0, False), (1, False), (2, True), (8, True)])
def test_how_far_it_may_run_ahead_changes_no_token(
    tiny_gguf: Path, own_folder: Path, outcomes: list[Ahead | None], steps: int, kept: bool
) -> None:
    """Of a draft model that is the verifier nearly all that is drafted ahead is kept."""
    profile = replace(CPU, speculation=Speculation(max_speculative_steps=steps))
    with open_auto(tiny_gguf, own_folder, mode="overlapped", policy=Fixed(4), profile=profile) as runtime:
        found = runtime.generate(PROMPTS[0], params(0.8, max_tokens=60))
        assert_plains(runtime, PROMPTS[0], params(0.8, max_tokens=60), found.tokens)
    assert found.stats.accepted > 30
    assert outcomes.count("kept") > found.stats.rounds / 2 if kept else set(outcomes) == {None}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["own_folder", "noisy", "lookup"])
def test_four_at_once_get_what_each_would_get_alone(
    tiny_gguf: Path, request: pytest.FixtureRequest, kind: str, mode: Any
) -> None:
    draft = kind if kind == "lookup" else request.getfixturevalue(kind)
    policy = Goodput() if mode == "auto" else Fixed(3)
    asked = [(prompt, params(0.8 * (i % 2), seed=i)) for i, prompt in enumerate(PROMPTS)]
    with open_auto(tiny_gguf, draft, num_slots=4, mode=mode, policy=policy) as runtime, ThreadPoolExecutor(4) as pool:
        assert runtime._drafter is None if mode == "plain" else runtime._drafter.num_slots == 4  # type: ignore[union-attr]
        found = [future.result() for future in [pool.submit(runtime.generate, *one) for one in asked]]
        for one, result in zip(asked, found, strict=True):
            assert_plains(runtime, *one, result.tokens)
        if kind == "own_folder" and mode in ("sequential", "overlapped"):
            assert sum(result.stats.accepted for result in found) > 40
        assert len({result.tokens for result in found}) == len(asked)


def test_requests_of_different_modes_share_one_runtime(tiny_gguf: Path, own_folder: Path) -> None:
    modes: list[Any] = ["plain", "sequential", "overlapped"] * 2
    options: dict[str, Any] = {"num_slots": 3, "mode": "sequential", "policy": Fixed(3)}
    with open_auto(tiny_gguf, own_folder, **options) as runtime, ThreadPoolExecutor(6) as pool:
        asked = [(PROMPTS[i % 4], params(0.8, seed=i)) for i in range(len(modes))]
        futures = [pool.submit(runtime.generate, *one, mode=mode) for one, mode in zip(asked, modes, strict=True)]
        for one, future in zip(asked, futures, strict=True):
            assert_plains(runtime, *one, future.result().tokens)
