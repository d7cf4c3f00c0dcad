"""Without the extra, every way into the toolkit says in one line what to install."""

from __future__ import annotations

import collections.abc as abc
import sys
from pathlib import Path

import pytest

from edgespec.errors import MissingDependencyError
from quantize import build_draft
from quantize.gguf_shape import read_gguf
from quantize.head import choose_head
from quantize.imatrix import read_imatrix
from quantize.source import open_source
from tests.quantize.make_imatrix import write_gguf_imatrix
from tests.tiny import TinyConfig, write_gguf

WAYS: dict[str, abc.Callable[[Path], object]] = {
    "open_source": open_source,
    "read_gguf": read_gguf,
    "choose_head": lambda path: choose_head(path, 10),
    "build_draft": lambda path: build_draft(path, path.with_name("draft")),
    "read_imatrix": lambda path: read_imatrix(write_gguf_imatrix(path.with_name("matrix"), TinyConfig())),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_without_gguf(way: abc.Callable[[Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_gguf(tmp_path / "source.gguf")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(MissingDependencyError, match=r"needs gguf; get it with: pip install 'edgespec\[quantize\]'$"):
        way(path)
