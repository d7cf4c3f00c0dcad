"""What fails while a pair is opened and afterwards, over tiny real models: a lower mode, one line, no lost token."""

from __future__ import annotations

import collections.abc as abc
import json
import os
import signal
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from edgespec import calibration, opening, survey
from edgespec.core.policy import Fixed
from edgespec.core.sequence import Cancelled, never
from edgespec.devices.profile import Profile
from edgespec.drafters.onnx import OnnxDrafter
from edgespec.engine import calibrate as engine
from edgespec.errors import BackendError
from edgespec.pairs import Pair
from edgespec.runtime import Mode, Runtime
from edgespec.verifiers.base import Rows, ScoreRequest
from edgespec.verifiers.llama import LlamaOptions, LlamaVerifier
from tests.cli.terminal import only_error, run_command
from tests.devices.boxes import gpu, workstation
from tests.opening.pairs import CPU, key_of, open_auto, params
from tests.test_loading import assert_no_owner_is_left, llama_verifier
from tests.verifiers.rpc_tools import Worker, free_port

NO_GPU_MEMORY = "the GPU has no memory left"
PARAMS = params(0.8)


def plain_tokens(verifier: Path, prompt: str = "the cat") -> tuple[int, ...]:
    with open_auto(verifier, "none") as runtime:
        return runtime.generate(prompt, PARAMS).tokens


# A GPU that fails


class OnGpu(LlamaVerifier):
    """Computes on the CPU. With more layers "on the GPU" than that ``holds`` it fails after ``num_good`` scores; after
    none it does not even open.

    tried  the layers of all that were to be opened
    """

    holds = 0
    num_good = 0
    tried: ClassVar[list[int]] = []

    def __init__(self, options: LlamaOptions) -> None:
        layers = options.num_gpu_layers if options.num_gpu_layers >= 0 else 99
        self.tried.append(options.num_gpu_layers)
        self._fails = layers > self.holds
        self._left = self.num_good
        if self._fails and not self.num_good:
            raise BackendError(NO_GPU_MEMORY)
        super().__init__(replace(options, num_gpu_layers=0, devices=()))

    def score(self, requests: abc.Sequence[ScoreRequest], cancelled: Cancelled = never) -> list[Rows]:
        self._left -= 1
        if self._fails and self._left < 0:
            raise BackendError(NO_GPU_MEMORY)
        return super().score(requests, cancelled)


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> type[OnGpu]:
    """A box with one GPU, as far as anybody can tell."""
    monkeypatch.setattr(survey, "look_at_box", lambda _=(): workstation(gpu(20)))
    monkeypatch.setattr(opening, "LlamaVerifier", OnGpu)
    monkeypatch.setattr(OnGpu, "tried", [])
    return OnGpu


def open_there(verifier: Path, draft: Path | str, **options: Any) -> Runtime:
    return open_auto(verifier, draft, **{"profile": Profile("box"), "mode": "sequential", "policy": Fixed(3)} | options)


@pytest.mark.parametrize(
    ("holds", "tried", "placement"),
    [(0, [-1, 1, 0], "one device"), (1, [-1, 1], "hybrid (1 of 3 layers on the GPU)"), (99, [-1], "hybrid")],
)
def test_a_gpu_that_fails_at_load_is_given_less_or_nothing(
    tiny_gguf: Path,
    own_folder: Path,
    on_gpu: type[OnGpu],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    holds: int,
    tried: list[int],
    placement: str,
) -> None:
    monkeypatch.setattr(on_gpu, "holds", holds)
    with open_there(tiny_gguf, own_folder) as runtime:
        assert (on_gpu.tried, runtime.placement) == (tried, placement)
        steps = runtime.degraded.as_list()
        assert [(step["from"], step["to"]) for step in steps] == ([("hybrid", placement)] if len(tried) > 1 else [])
        assert all(NO_GPU_MEMORY in step["reason"] for step in steps)
        assert len([record for record in caplog.records if NO_GPU_MEMORY in record.getMessage()]) == len(steps)
        assert runtime.generate("the cat", PARAMS).tokens == plain_tokens(tiny_gguf)


def test_beside_a_gpu_both_at_once_is_measured(
    tiny_gguf: Path, own_folder: Path, own_cache: Path, on_gpu: type[OnGpu], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on_gpu, "holds", 99)
    monkeypatch.setattr(opening, "usable_cpus", lambda: 2)
    with open_there(tiny_gguf, own_folder, mode="auto") as runtime:
        assert runtime._service.is_measured
    (kept,) = (own_cache / "calibration").iterdir()
    content = json.loads(kept.read_text())["calibration"]
    assert content["threads"] == {"verifier": 1, "draft": 1, "spin": True, "together": True}
    assert content["curves"]["overlap"] is not None
    assert runtime.mode == (content["mode"] if content["mode"] != "plain" else "sequential")


def test_where_no_place_is_left_the_error_is_one_line(
    tiny_gguf: Path, own_folder: Path, on_gpu: type[OnGpu], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on_gpu, "holds", -1)
    with pytest.raises(BackendError, match=NO_GPU_MEMORY) as caught:
        open_there(tiny_gguf, own_folder)
    assert "\n" not in str(caught.value)
    assert_no_owner_is_left()


@pytest.mark.parametrize("mode", ["plain", "sequential", "overlapped", "auto"])
def test_a_gpu_that_fails_mid_run_loses_no_token(
    tiny_gguf: Path, own_folder: Path, on_gpu: type[OnGpu], monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    expected = plain_tokens(tiny_gguf)
    on_gpu.tried = []
    monkeypatch.setattr(on_gpu, "num_good", 2)
    with open_there(tiny_gguf, own_folder, mode=mode) as runtime:
        assert runtime.generate("the cat", PARAMS).tokens == expected
        assert on_gpu.tried == [-1, 1, 0]
        assert NO_GPU_MEMORY in [step["reason"] for step in runtime.degraded.as_list()]


def test_a_verifier_in_a_process_of_its_own(tiny_gguf: Path, own_folder: Path) -> None:
    """Calibrated there, too. Whatever ends it, the next request is answered."""
    profile = replace(CPU, verifier=replace(CPU.verifier, isolate=True))
    with open_auto(tiny_gguf, own_folder, profile=profile) as runtime:
        assert runtime._service.is_measured
        expected = runtime.generate("the cat", PARAMS, mode="plain").tokens
        os.kill(llama_verifier(runtime).pid, signal.SIGKILL)
        assert runtime.generate("the cat", PARAMS).tokens == expected
    assert_no_owner_is_left()


# A draft model that fails


class Gate:
    """What a draft model does after ``num_good`` calls: fail, or hang until ``opened``."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.opened, self.num_good, self.hangs = threading.Event(), 0, False
        self.num_hanging = 0
        propose = OnnxDrafter.propose

        def gated(drafter: OnnxDrafter, *arguments: Any) -> Any:
            self.num_good -= 1
            if self.num_good < 0 and not self.hangs:
                raise BackendError("the draft model broke")
            if self.num_good < 0:
                self.num_hanging += 1
                self.opened.wait(20)
                self.num_hanging -= 1
            return propose(drafter, *arguments)

        patch.setattr(OnnxDrafter, "propose", gated)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> abc.Iterator[Gate]:
    gate = Gate(monkeypatch)
    yield gate
    gate.opened.set()


@pytest.mark.parametrize("mode", ["sequential", "overlapped"])
def test_a_draft_model_that_fails_mid_run_leaves_the_text_whole(
    tiny_gguf: Path, own_folder: Path, gate: Gate, mode: Mode
) -> None:
    gate.num_good = 3
    with open_auto(tiny_gguf, own_folder, mode=mode, policy=Fixed(3)) as runtime:
        first, second = (runtime.generate("the cat", PARAMS) for _ in range(2))
        assert first.tokens == second.tokens == plain_tokens(tiny_gguf)
        assert first.stats.drafted > second.stats.drafted  # lookup alone
        step = {"from": "the draft model", "to": "lookup", "reason": "the draft model broke"}
        assert runtime.degraded.as_list() == [step]


def test_a_draft_model_that_fails_while_it_is_measured(
    tiny_gguf: Path,
    own_folder: Path,
    own_cache: Path,
    gate: Gate,
) -> None:
    gate.num_good = 2
    with open_auto(tiny_gguf, own_folder) as runtime:
        step = {"from": "one device", "to": "lookup", "reason": "the draft model broke"}
        assert runtime.degraded.as_list() == [step]
        assert (runtime.draft_name, runtime.mode, runtime.placement) == ("lookup", "sequential", "lookup (CPU)")
        assert runtime.generate("the cat", PARAMS).tokens == plain_tokens(tiny_gguf)
    assert not (own_cache / "calibration").exists()


def test_a_draft_model_that_hangs_while_it_is_measured_does_not_hold_lookup_up(
    tiny_gguf: Path, own_folder: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "PATIENCE_S", 0.1)
    gate.hangs = True
    with open_auto(tiny_gguf, own_folder, policy=Fixed(3)) as runtime:
        (step,) = runtime.degraded.as_list()
        assert step["to"] == "lookup"
        assert step["reason"].startswith("the draft model gave no answer")
        stats = runtime.generate("abcabcabcabc", replace(PARAMS, temperature=0.0), raw=True).stats
        assert stats.drafted > 0
        assert gate.num_hanging == 1
    gate.opened.set()
    assert_no_owner_is_left()


def test_what_cannot_be_measured_is_learned_on_the_way(
    tiny_gguf: Path, own_folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A clock that stands still, for example."""
    quick = calibration.quick
    monkeypatch.setattr(calibration, "quick", lambda *a, **o: quick(*a, **o, clock=lambda: 1.0))
    with open_auto(tiny_gguf, own_folder) as runtime:
        assert (runtime.mode, runtime.draft_name) == ("sequential", own_folder.name)
        assert not runtime._service.is_measured
        assert runtime.generate("the cat", PARAMS).tokens == plain_tokens(tiny_gguf)
    told = [record.getMessage() for record in caplog.records if "could not be measured" in record.getMessage()]
    assert len(told) == 1
    assert "the clock jumps" in told[0]
    assert calibration.load(key_of(tiny_gguf, own_folder)) is None


# Workers


@pytest.fixture
def nothing_loads(no_model: None, no_measuring: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: Any, **__: Any) -> Any:
        raise AssertionError("something was built or loaded")

    for owner, name in ((Pair, "ensure_draft"), (opening, "Vocabulary"), (opening, "IsolatedVerifier")):
        monkeypatch.setattr(owner, name, forbidden)


@pytest.mark.parametrize(
    ("workers", "code", "words"),
    [
        (["127.0.0.1:{port}"], 10, "no worker at 127.0.0.1:"),
        (["nonsense"], 2, "allowed: host:port"),
        (["127.0.0.1:1", "127.0.0.1:1"], 2, "twice"),
    ],
)
@pytest.mark.parametrize("named", [True, False])
def test_workers_that_do_not_answer_are_one_line_before_anything_loads(
    tiny_gguf: Path,
    nothing_loads: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    named: bool,
    workers: list[str],
    code: int,
    words: str,
) -> None:
    """Of a pair whose draft model would have to be built, too."""
    models = ("--verifier", str(tiny_gguf)) if named else ()
    asked = [part for worker in workers for part in ("--rpc", worker.format(port=free_port()))]
    result = run_command(monkeypatch, capsys, "run", "the", *models, *asked)
    assert words in only_error(result)
    assert (result[0], result[2].count("\n")) == (code, 1)


def test_a_verifier_on_a_worker_gives_plains_tokens_and_says_when_it_is_gone(tiny_gguf: Path, own_folder: Path) -> None:
    worker = Worker()
    try:
        options: dict[str, Any] = {"profile": Profile("box"), "mode": "overlapped", "policy": Fixed(3)}
        with open_auto(tiny_gguf, own_folder, workers=[str(worker)], **options) as runtime:
            assert runtime.placement == "hybrid"
            assert runtime.generate("the cat", PARAMS).tokens == plain_tokens(tiny_gguf)
            worker.kill()
            with pytest.raises(BackendError, match=str(worker)) as caught:
                runtime.generate("the dog", PARAMS)
            assert "\n" not in str(caught.value)
            worker.start()
            assert runtime.generate("the cat", PARAMS).tokens == plain_tokens(tiny_gguf)
    finally:
        worker.kill()
    assert_no_owner_is_left()
