"""The doctor where something installed is not right."""

from __future__ import annotations

import importlib.metadata
import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest

from edgespec.devices.profile import GIB
from edgespec.doctor import box, first_problem, models, software
from edgespec.doctor.job import child
from edgespec.errors import (
    BackendError,
    FileAccessError,
    MissingDependencyError,
    ModelFormatError,
)
from tests.doctor.patients import PLENTY, WHATS, look, only_problem


def test_a_package_is_missing_or_too_old(pair: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.metadata.version

    def version(name: str) -> str:
        if name == "numpy":
            raise importlib.metadata.PackageNotFoundError(name)
        return "0.2.9" if name == "click" else real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(
        importlib.metadata, "requires", lambda name: ["numpy>=1.26", "click>=8.1", "x>=2; extra == 'y'"]
    )
    first, second = [finding for finding in look(**pair) if finding.status == "problem"]
    assert (first.what, first.error, first.remedy) == (WHATS[0], MissingDependencyError, "pip install 'click>=8.1'")
    assert "numpy is not installed, 1.26 or newer is needed" in second.detail


def test_not_installed_at_all_is_a_checkout(pair: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", missing)
    monkeypatch.setattr(importlib.metadata, "version", missing)
    assert "edgespec from a checkout" in look(**pair)[0].detail


@pytest.mark.parametrize(
    ("preflight", "what"),
    [("import os; os.abort()", "SIGABRT"), ("import time; time.sleep(60)", "does not answer within 1 s")],
)
def test_llama_cpp_dies_and_the_doctor_does_not(
    preflight: str, what: str, pair: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(software, "PREFLIGHT", preflight)
    monkeypatch.setattr(software, "child", lambda arguments: child(arguments, 1.0 if "sleep" in preflight else 60.0))
    findings = look(**pair)
    problem = only_problem(findings, "llama.cpp", BackendError)
    assert what in problem.detail
    assert "CMAKE_ARGS" in problem.remedy
    assert [finding.what for finding in findings[2:]] == [
        "ONNX Runtime", "cache folder", "profile", "GPU", "CPUs", "verifier", "draft model", "disk",
    ]  # fmt: skip


def test_a_verifier_at_which_llama_cpp_aborts(pair: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    dying = "import os, sys; sys.argv[1:] and os.abort()"
    monkeypatch.undo()
    monkeypatch.setattr(software, "PREFLIGHT", dying)
    monkeypatch.setattr(box, "look_at_box", lambda workers: PLENTY)
    problem = only_problem(look(**pair), "verifier", ModelFormatError)
    assert "SIGABRT" in problem.detail


def test_the_real_preflight_survives(tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert software._dies(str(tiny_gguf)) == ""
    assert software._dies(str(Path(__file__))) == ""  # an error is no death
    assert software._dies("/no/such/file") == ""


def test_repacked_weights_do_not_work(pair: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(software, "use_extra_bufts", lambda folder: False)
    found = next(finding for finding in look(**pair) if finding.what == WHATS[2])
    assert (found.status, "slower" in found.detail) == ("note", True)
    assert 'CMAKE_ARGS="-DCMAKE_C_FLAGS=' in found.remedy
    assert "pip install --force-reinstall --no-cache-dir" in found.remedy


def test_llama_cpp_decodes_neither_way(pair: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(folder: Path) -> bool:
        raise BackendError("this build of llama.cpp cannot decode: signal 11; rebuild it: make")

    monkeypatch.setattr(software, "use_extra_bufts", fail)
    assert only_problem(look(**pair), WHATS[2], BackendError).remedy == "rebuild it: make"


def test_onnx_runtime_is_missing(pair: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> tuple[str, ...]:
        raise MissingDependencyError("ONNX Runtime does not load: gone; get it with: pip install onnxruntime")

    monkeypatch.setattr(software, "onnx_providers", fail)
    problem = only_problem(look(**pair), "ONNX Runtime", MissingDependencyError)
    assert problem.remedy == "get it with: pip install onnxruntime"
    assert first_problem(look(**(pair | {"draft": "lookup"}))) is None


def test_the_cache_folder_cannot_be_written_to(
    pair: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("EDGESPEC_CACHE_DIR", str(tmp_path / "file"))
    problem = only_problem(look(**pair), "cache folder", FileAccessError)
    assert problem.remedy == "set EDGESPEC_CACHE_DIR to a folder of yours"


def test_the_disk_is_full(
    pair: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, starter_gguf: Path
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage(GIB, GIB, 1000))
    assert "64 MiB needed" in only_problem(look(**pair), "disk", FileAccessError).detail
    monkeypatch.setenv("EDGESPEC_CACHE_DIR", str(tmp_path))
    assert "MiB needed" in only_problem(look(), "disk", FileAccessError).detail


def test_the_toolkit_is_missing_where_a_draft_is_to_be_built(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, starter_gguf: Path
) -> None:
    monkeypatch.setenv("EDGESPEC_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(models, "TOOLKIT", ("onnx", "no_such_package"))
    problem = only_problem(look(), "draft model", MissingDependencyError)
    assert problem.remedy == "pip install 'edgespec[quantize]'"
