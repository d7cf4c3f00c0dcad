"""What several command tests share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.terminal import Command, Result, run_command
from tests.tiny import TinyConfig, write_gguf


@pytest.fixture
def quantize(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs ``edgespec quantize`` with its arguments."""

    def run(*arguments: str | Path) -> Result:
        return run_command(monkeypatch, capsys, "quantize", *arguments)

    return run


@pytest.fixture(scope="session")
def big(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = TinyConfig(width=128, num_layers=3, num_heads=4, num_hidden=256, seed=5)
    return write_gguf(tmp_path_factory.mktemp("big") / "big.gguf", config)
