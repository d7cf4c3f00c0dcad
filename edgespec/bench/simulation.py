"""Runs a pair at the pace of named devices, mode against mode. Every figure it gives is a simulation's."""

from __future__ import annotations

import collections.abc as abc
import contextlib
import random
import statistics
import threading
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from edgespec.bench.device_curves import SimulatedDevice
from edgespec.bench.rate import Run, acceptance, rate, rotated, timed
from edgespec.bench.simulate import Pace, SimulatedDrafter, SimulatedVerifier, paces
from edgespec.bench.suite import Question
from edgespec.core.costs import Curves
from edgespec.core.policy import Policy
from edgespec.core.sequence import Cancelled, Draft, SamplingParams, never
from edgespec.devices.profile import load_profile
from edgespec.drafters import vocabulary
from edgespec.drafters.base import Drafter, DraftRequest
from edgespec.drafters.combined import CombinedDrafter
from edgespec.drafters.lookup import LookupDrafter
from edgespec.engine.advice import advise
from edgespec.errors import ModelNotFoundError
from edgespec.paths import cache_dir
from edgespec.runtime import Mode, Runtime
from edgespec.text.tokenizer import Tokenizer
from edgespec.verifiers.base import ScoreRequest, Verifier
from edgespec.verifiers.canary import use_extra_bufts
from edgespec.verifiers.llama import LlamaOptions, LlamaVerifier

MAX_DRAFT = 11  # longer drafts would need a dilation that few have the time for
MAX_LATE = 0.01  # of the device's time, beyond which a result is spoiled
MARGIN = 1.35  # what the real work may be slower than it was when it was measured
NUM_CTX = 2048
PLAIN_TOKENS = 16  # every token of plain takes the same time, so that few will do
WIDTHS = (1, 2, 4, 8, MAX_DRAFT + 1)
GREEDY = SamplingParams(temperature=0.0, max_tokens=2)

# A mode, or the one that ``auto`` would choose on the device.
Way = Literal["plain", "sequential", "overlapped", "auto"]
WAYS: tuple[Way, ...] = ("plain", "sequential", "overlapped", "auto")
Progress = abc.Callable[[str, float], None]


class Real(NamedTuple):
    """What this box needs, in seconds, one thread a side and both at work: a verification by width, a drafted token."""

    verify_s: dict[int, float]
    step_s: float

    def dilation(self, device: SimulatedDevice) -> float:
        """By how much the device's time is to be stretched so that the real work fits into it."""
        ratios = [real_s / device.verify_s(width) for width, real_s in self.verify_s.items()]
        return MARGIN * max(*ratios, self.step_s / device.step_s)


@dataclass
class Outcome:
    """One device's. ``runs`` has one a prompt for each mode; seconds are the device's."""

    device: SimulatedDevice
    dilation: float
    runs: dict[Way, list[Run]] = field(default_factory=dict)
    num_passes: int = 0
    num_late: int = 0
    late: float = 0.0  # seconds the real work came too late, of those simulated

    @property
    def spoiled(self) -> bool:
        return self.late > MAX_LATE

    def rate(self, mode: Way) -> float:
        """Tokens a simulated second, over all prompts."""
        return rate(self.runs[mode])

    def ratio(self, mode: Way, base: Way) -> float:
        """Median over the prompts of the one rate by the other; prompts answered in a single round are left out."""
        pairs = [(rate([a]), rate([b])) for a, b in zip(self.runs[mode], self.runs[base], strict=True)]
        return statistics.median([a / b for a, b in pairs if a and b] or [0.0])

    def acceptance(self, mode: Way) -> float:
        return acceptance(self.runs[mode])

    def as_dict(self) -> dict[str, Any]:
        device = self.device
        return {
            "simulated": True,
            "profile": device.profile,
            "device": device.verifier.name,
            "draft_device": device.drafter.name,
            "model": device.model.name,
            "sources": device.sources,
            "verify_ms": {width: round(1000 * device.verify_s(width), 2) for width in (1, MAX_DRAFT + 1)},
            "draft_token_ms": round(1000 * device.step_s, 2),
            "dilation": round(self.dilation, 2),
            "tokens_per_s": {mode: round(self.rate(mode), 2) for mode in self.runs},
            "over_plain": {mode: round(self.ratio(mode, "plain"), 3) for mode in self.runs if "plain" in self.runs},
            "acceptance_rate": {mode: round(self.acceptance(mode), 3) for mode in self.runs},
            "late": {"passes": self.num_late, "of": self.num_passes, "share_of_time": round(self.late, 4)},
            "spoiled": self.spoiled,
        }


class Models:
    """A pair, opened with one thread a side, to be used by one Simulation after the other. A context manager."""

    def __init__(self, verifier: Path, draft: str | Path) -> None:
        self._undo = contextlib.ExitStack()
        with contextlib.ExitStack() as undo:
            extra = use_extra_bufts(cache_dir())
            self.verifier = LlamaVerifier(LlamaOptions(verifier, 1, max_ctx=NUM_CTX, use_extra_bufts=extra))
            undo.callback(self.verifier.close)
            self.tokenizer = Tokenizer(self.verifier.model)
            self.drafter = _open_drafter(draft, self.verifier, self.tokenizer)
            undo.callback(self.drafter.close)
            self._undo = undo.pop_all()

    @property
    def is_free(self) -> bool:
        """Whether drafting costs nothing worth simulating."""
        return isinstance(self.drafter, LookupDrafter)

    def __enter__(self) -> Models:
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()


def _open_drafter(draft: str | Path, verifier: LlamaVerifier, tokenizer: Tokenizer) -> Drafter:
    if draft == "lookup":
        return LookupDrafter()
    if not Path(draft).exists():
        raise ModelNotFoundError(f"no draft model at {draft}; give a draft folder or an .onnx file, or: lookup")
    from edgespec.drafters.onnx import OnnxDrafter

    drafter = OnnxDrafter.open(draft, num_ctx=verifier.num_ctx, num_threads=1, num_vocab=tokenizer.num_vocab)
    vocabulary.check(drafter.tokens, tokenizer.tokens)
    return drafter


def measure(verifier: Verifier, drafter: Drafter, num_rounds: int = 3) -> Real:
    """What this box needs for the real work, the slowest of ``num_rounds``."""
    random_tokens = random.Random(0)
    prefix = random_tokens.choices(range(min(verifier.num_vocab, 1000)), k=min(128, verifier.num_ctx // 2))
    stop, steps = threading.Event(), [0.0]
    beside = threading.Thread(target=_draft_on, args=(drafter, prefix, stop, steps))
    beside.start()
    try:
        verify_s = dict.fromkeys(WIDTHS, 0.0)
        for _ in range(num_rounds):
            for width in WIDTHS:
                verifier.score([ScoreRequest(0, prefix, 1)])
                draft = random_tokens.choices(range(min(verifier.num_vocab, 1000)), k=width)
                began = time.perf_counter()
                verifier.score([ScoreRequest(0, [*prefix, *draft], width)])
                verify_s[width] = max(verify_s[width], time.perf_counter() - began)
    finally:
        stop.set()
        beside.join()
    return Real(verify_s, statistics.median(steps))


def _draft_on(drafter: Drafter, prefix: list[int], stop: threading.Event, steps: list[float]) -> None:
    """Draft until told to stop; ``steps`` gets the seconds of each token."""
    last = 0.0

    def asked() -> bool:
        nonlocal last
        now = time.perf_counter()
        if last:
            steps.append(now - last)
        last = now
        return stop.is_set()

    while not stop.is_set():
        last = 0.0
        if not drafter.propose([DraftRequest(0, prefix, len(prefix), MAX_DRAFT, GREEDY)], asked)[0].tokens:
            break  # lookup finds nothing here, and costs nothing


@dataclass(frozen=True)
class Simulation:
    """What to run."""

    questions: abc.Sequence[Question]
    params: SamplingParams
    modes: abc.Sequence[Way]
    policy: Policy

    def run(self, models: Models, device: SimulatedDevice, dilation: float, progress: Progress) -> Outcome:
        """Every prompt in every mode, in an order that rotates from prompt to prompt."""
        outcome = Outcome(device, dilation, {mode: [] for mode in self.modes})
        verifier_pace, drafter_pace = paces(device, dilation)
        with _runtime(models, device, dilation, verifier_pace, drafter_pace) as runtime:
            for turn, question in enumerate(self.questions):
                progress(f"simulated {device.profile}", turn / len(self.questions))
                runtime.generate(question.prompt, GREEDY, mode="sequential")  # both sides then hold the prompt
                for way in rotated(self.modes, turn):
                    mode = device_mode(device, is_free=models.is_free) if way == "auto" else way
                    run = timed(runtime, question.prompt, self._params(mode), mode, self.policy)
                    outcome.runs[way].append(run._replace(seconds=run.seconds / dilation))
        both = (verifier_pace, drafter_pace)
        outcome.num_passes, outcome.num_late = (sum(pace.num_passes for pace in both), sum(p.num_late for p in both))
        outcome.late = sum(pace.late_s for pace in both) / max(sum(pace.paced_s for pace in both), 1e-9)
        return outcome

    def _params(self, mode: Mode) -> SamplingParams:
        most = self.params.max_tokens or PLAIN_TOKENS
        return replace(self.params, max_tokens=min(most, PLAIN_TOKENS)) if mode == "plain" else self.params


def device_mode(device: SimulatedDevice, *, is_free: bool = False) -> Mode:
    """What ``auto`` would choose there."""
    curves = _curves(device, 1.0, is_free)
    return advise(curves, curves if curves.overlap else None, is_free=is_free).mode


def _curves(device: SimulatedDevice, dilation: float, is_free: bool) -> Curves:
    """With drafts that cost nothing, as lookup's do, there is nothing to overlap either."""
    curves = device.curves(dilation)
    return replace(curves, batches=(), step_s=(), overlap=None) if is_free else curves


def _runtime(
    models: Models, device: SimulatedDevice, dilation: float, verifier_pace: Pace, drafter_pace: Pace
) -> Runtime:
    drafter: Drafter = _LentDrafter(models.drafter, device.step_s, drafter_pace, is_free=models.is_free)
    return Runtime(
        _Lent(models.verifier, device, verifier_pace),
        drafter if models.is_free else CombinedDrafter(drafter, LookupDrafter()),
        models.tokenizer,
        mode="sequential",
        curves=_curves(device, dilation, models.is_free),
        max_ahead=load_profile(device.profile).speculation.max_speculative_steps,
    )


class _Lent(SimulatedVerifier):
    """Stays open when its runtime is closed: the next device uses the same models."""

    def close(self) -> None: ...


class _LentDrafter(SimulatedDrafter):
    """The same. One that costs nothing, as lookup, keeps its own pace."""

    def __init__(self, drafter: Drafter, step_s: float, pace: Pace, *, is_free: bool) -> None:
        super().__init__(drafter, step_s, pace)
        self._is_free = is_free

    def propose(self, requests: abc.Sequence[DraftRequest], cancelled: Cancelled = never) -> list[Draft]:
        return self._inner.propose(requests, cancelled) if self._is_free else super().propose(requests, cancelled)

    def close(self) -> None: ...
