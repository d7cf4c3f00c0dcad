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
