"""CPUs that tests can count on."""

from __future__ import annotations

import os

import psutil
import pytest


def pretend_cpus(patch: pytest.MonkeyPatch, num_cpus: int) -> None:
    patch.setattr(os, "cpu_count", lambda: num_cpus)
    patch.setattr(psutil, "cpu_count", lambda logical=True: num_cpus)
    patch.setattr(os, "sched_getaffinity", lambda pid: set(range(num_cpus)), raising=False)


@pytest.fixture
def eight_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_cpus(monkeypatch, 8)
