"""Boxes and jobs for the doctor, and what is asked of its findings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from edgespec.devices.probe import Box
from edgespec.devices.profile import GIB, Profile, as_toml
from edgespec.doctor import Finding, Job, box, diagnose
from edgespec.errors import EdgespecError
from tests.devices.boxes import CPU

WHATS = [
    "Python and packages", "llama.cpp", "repacked weights (AMX canary)", "ONNX Runtime", "cache folder", "profile",
    "GPU", "CPUs", "verifier", "draft model", "disk", "tokenizer", "context", "memory", "placement",
]  # fmt: skip
PLENTY = Box(8, 16 * GIB, 12 * GIB, devices=(CPU,))


def on_box(patch: pytest.MonkeyPatch, there: Box) -> None:
    patch.setattr(box, "look_at_box", lambda workers: there)


def look(**options: Any) -> list[Finding]:
    return list(diagnose(Job(**options)))


def only_problem(findings: list[Finding], what: str, error: type[EdgespecError]) -> Finding:
    (problem,) = [finding for finding in findings if finding.status == "problem"]
    assert (problem.what, problem.error) == (what, error)
    assert problem.remedy
    return problem


def problems(findings: list[Finding]) -> list[str]:
    return [finding.what for finding in findings if finding.status == "problem"]


def profile(path: Path, **sections: Any) -> str:
    path.write_text(as_toml(Profile("x", **sections)), encoding="utf-8")
    return str(path)
