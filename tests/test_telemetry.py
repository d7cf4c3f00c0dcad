"""Nothing is noted or sent behind the user's back."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("module", ["edgespec.drafters.onnx", "edgespec.loading", "quantize.weights_file"])
def test_onnx_runtime_leaves_no_trace_in_the_home_folder(module: str, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "ORT_DISABLE_TELEMETRY"}
    environment |= {"HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache"), "PYTHONDONTWRITEBYTECODE": "1"}
    script = f"import {module}, onnxruntime"
    subprocess.run([sys.executable, "-c", script], env=environment, check=True, cwd=Path(__file__).parents[1])
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_building_a_draft_leaves_the_programs_logging_alone() -> None:
    script = (
        "import io, logging\n"
        "from quantize.weights_file import WeightsFile\n"
        "WeightsFile(io.BytesIO(), 8, 32)\n"
        "print(logging.getLogger().handlers, logging.getLogger().level == logging.WARNING)"
    )
    root = Path(__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=root)
    assert done.stdout == "[] True\n"
