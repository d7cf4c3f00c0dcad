"""What every test of the doctor stands on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from edgespec.doctor import software
from tests.doctor.patients import PLENTY, on_box


@pytest.fixture(autouse=True)
def this_box(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same on every box; without llama.cpp's trial in a process of its own, which has tests of its own."""
    on_box(monkeypatch, PLENTY)
    monkeypatch.setattr(software, "_dies", lambda *arguments: "")


@pytest.fixture
def pair(tiny_gguf: Path, own_folder: Path) -> dict[str, Any]:
    return {"verifier": tiny_gguf, "draft": str(own_folder)}
