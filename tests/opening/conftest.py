"""What all tests of opening share: a cache of their own, and what must not happen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from edgespec import calibration, opening
from edgespec.calibration import measuring
from edgespec.drafters.onnx import OnnxDrafter


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own. Whether repacked weights work is known; tiny models need little time."""
    monkeypatch.setenv("EDGESPEC_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(opening, "use_extra_bufts", lambda _: True)
    monkeypatch.setattr(measuring, "QUICK_S", 0.3)
    return tmp_path / "cache"


@pytest.fixture
def no_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "quick", _forbidden)


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """No draft model is opened."""
    monkeypatch.setattr(OnnxDrafter, "open", _forbidden)


def _forbidden(*_: Any, **__: Any) -> Any:
    raise AssertionError("this was not to happen")
