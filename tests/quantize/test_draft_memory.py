"""A build needs little more memory than the draft it makes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from quantize.gguf_source import open_gguf

CHILD = """
import re, sys
from pathlib import Path
from quantize import build_draft
build_draft(Path(sys.argv[1]), Path(sys.argv[2]), bits=int(sys.argv[3]), block_size=int(sys.argv[4]))
status = Path("/proc/self/status").read_text()
print(1024 * int(re.search(r"VmHWM:\\s+(\\d+) kB", status)[1]))
"""


@pytest.mark.model
@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from /proc")
@pytest.mark.parametrize(("bits", "block_size"), [(4, 32), (4, 128), (8, 32), (32, 32)])
def test_the_peak_of_a_build(bits: int, block_size: int, starter_gguf: Path, tmp_path: Path) -> None:
    """All of the process counts, the interpreter and its libraries too. Largest is the embedding, 113 MB in float32."""
    out = tmp_path / "draft"
    arguments = [sys.executable, "-c", CHILD, str(starter_gguf), str(out), str(bits), str(block_size)]
    ended = subprocess.run(arguments, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    d = open_gguf(starter_gguf).dimensions
    most = 1.5 * 4 * d.num_vocab * d.width + sum(path.stat().st_size for path in out.iterdir())
    assert int(ended.stdout) <= most
