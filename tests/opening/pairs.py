"""Opening tiny pairs in mode auto, and calibrations of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from edgespec import calibration, loading, survey
from edgespec.calibration import Calibration, Key
from edgespec.core.costs import Curves, Overlap
from edgespec.core.sequence import SamplingParams
from edgespec.devices.profile import Profile, Verifier
from edgespec.devices.threads import Threads
from edgespec.loading import load
from edgespec.runtime import Mode, Runtime
from tests.tiny import END_OF_TEXT, IM_END

CPU = Profile("cpu", verifier=Verifier(gpu_layers=0))
CURVES = Curves((1, 8), (16,), ((0.010, 0.011),), (1,), (0.001,), Overlap(1.1, 1.2), 0.0001)
IN_TURN = Threads(1, 1)
NEVER_ENDING = ((END_OF_TEXT, -100.0), (IM_END, -100.0))


def params(temperature: float = 0.0, max_tokens: int = 24, seed: int = 5) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed, logit_bias=NEVER_ENDING)


def open_auto(verifier: Path, draft: Path | str | None, **options: Any) -> Runtime:
    """One thread a side: on a busy box more would wait for each other."""
    usual: dict[str, Any] = {"num_threads": 1, "profile": CPU}
    return load(verifier=verifier, draft=draft, **usual | options)


def key_of(verifier: Path, draft: Path | str, profile: Profile = CPU) -> Key:
    """Of what ``open_auto`` loads."""
    options = loading._verifier_options(verifier, profile, None, 1)
    return calibration.key_of(options, draft, profile, survey.look_at_box().devices, 1)


def keep(key: Key, mode: Mode, threads: Threads = IN_TURN, gain: float = 2.0) -> None:
    """A calibration as ``edgespec calibrate`` leaves it."""
    now = "2026-11-30T12:00:00+00:00"
    found = Calibration(CURVES, threads, mode, "as measured", gain, 0.01, now, 40.0, is_quick=False)
    assert calibration.store(key, found) is not None
