"""Both sides on CPUs of their own, where a profile asks for it."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from edgespec.core.policy import Fixed
from edgespec.devices.probe import usable_cpus
from edgespec.devices.profile import Speculation
from edgespec.devices.threads import places, split
from edgespec.owner import Owner
from tests.opening.pairs import CPU, open_auto, params

pytestmark = pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="CPUs cannot be chosen on this system")


def cpus_of(owner: Owner) -> set[int]:
    return owner.submit(lambda: os.sched_getaffinity(0)).result()


@pytest.mark.parametrize("pin", [True, False])
def test_both_sides_stay_on_cpus_of_their_own(tiny_gguf: Path, own_folder: Path, pin: bool) -> None:
    profile = replace(CPU, speculation=Speculation(mode="overlapped", pin=pin))
    wanted = places(split(usable_cpus(), together=True)) if pin else None
    with open_auto(tiny_gguf, own_folder, profile=profile, num_threads=None, policy=Fixed(3)) as runtime:
        assert runtime._drafter is not None
        got = cpus_of(runtime._service._owner), cpus_of(runtime._drafter._owner)
        assert len(runtime.generate("the", params(max_tokens=4)).tokens) == 4
    free = os.sched_getaffinity(0)
    assert got == (wanted or (free, free))
