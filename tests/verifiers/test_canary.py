"""The canary, with children that crash, hang or succeed on demand, and once for real."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path

import pytest

from edgespec.errors import BackendError, MissingDependencyError
from edgespec.verifiers import canary
from edgespec.verifiers.canary import MODEL, use_extra_bufts

COUNT = "import pathlib, sys; pathlib.Path(sys.argv[1]).open('a').write('.'); plain = '--no-extra-bufts' in sys.argv; "
FINE = COUNT
CRASHES = COUNT + "import os, signal; plain or os.kill(os.getpid(), signal.SIGSEGV)"
HANGS = COUNT + "import time; plain or time.sleep(60)"
FAILS = COUNT + "plain or sys.exit('the logits are not finite')"
ALWAYS_FAILS = COUNT + "sys.exit('no libgomp')"


@pytest.fixture(autouse=True)
def _new_process() -> None:
    canary._warn_once.cache_clear()


@pytest.fixture
def library_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "lib"
    folder.mkdir()
    (folder / "libggml-cpu.so").write_bytes(b"first build")
    return folder


@pytest.fixture
def started(tmp_path: Path) -> Path:
    return tmp_path / "started"


def ask(cache: Path, code: str, started: Path, library_dir: Path, timeout_s: float = 20.0) -> bool:
    command = (sys.executable, "-c", code, str(started))
    return use_extra_bufts(cache, command=command, timeout_s=timeout_s, library_dir=library_dir)


def num_children(started: Path) -> int:
    return len(started.read_text(encoding="utf-8"))


def test_a_child_that_decodes_says_yes_and_is_not_asked_again(tmp_path: Path, started: Path, library_dir: Path) -> None:
    for _ in range(2):
        assert ask(tmp_path / "new" / "cache", FINE, started, library_dir)
    assert num_children(started) == 1


@pytest.mark.parametrize("code", [CRASHES, FAILS])
def test_a_child_that_dies_turns_extra_bufts_off_and_that_is_logged_once(
    tmp_path: Path, started: Path, library_dir: Path, code: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "edgespec"):
        assert not ask(tmp_path, code, started, library_dir)
        assert not ask(tmp_path, code, started, library_dir)
    assert num_children(started) == 2
    (record,) = caplog.records
    assert (
        "CMAKE_ARGS=\"-DCMAKE_C_FLAGS='-fno-tree-dse -fno-dse' -DCMAKE_CXX_FLAGS='-fno-tree-dse -fno-dse'\" "
        "pip install --force-reinstall --no-cache-dir --no-deps llama-cpp-python==0.3."
    ) in record.getMessage()


def test_a_kept_no_is_logged_again_by_the_next_process(
    tmp_path: Path, started: Path, library_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ask(tmp_path, CRASHES, started, library_dir)
    canary._warn_once.cache_clear()
    caplog.clear()
    assert not ask(tmp_path, CRASHES, started, library_dir)
    assert len(caplog.records) == 1
    assert num_children(started) == 2


def test_a_child_that_hangs_is_given_up(tmp_path: Path, started: Path, library_dir: Path) -> None:
    assert not ask(tmp_path, HANGS, started, library_dir, timeout_s=2.0)


def test_a_library_that_decodes_neither_way_is_an_error_that_is_not_kept(
    tmp_path: Path, started: Path, library_dir: Path
) -> None:
    for _ in range(2):
        with pytest.raises(BackendError, match=r"cannot decode: no libgomp, exit code 1; .*rebuild it: CMAKE_ARGS="):
            ask(tmp_path, ALWAYS_FAILS, started, library_dir)
    assert num_children(started) == 4


def test_a_command_that_does_not_start_is_an_error(tmp_path: Path, library_dir: Path) -> None:
    with pytest.raises(BackendError, match="does not start"):
        use_extra_bufts(tmp_path, command=("/no/such/python",), library_dir=library_dir)


def test_a_rebuilt_library_and_another_cpu_are_asked_anew(
    tmp_path: Path, started: Path, library_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not ask(tmp_path, CRASHES, started, library_dir)
    (library_dir / "libggml-cpu.so").write_bytes(b"second build, without the bug")
    assert ask(tmp_path, FINE, started, library_dir)
    monkeypatch.setattr(canary, "_cpu", lambda: ["another"])
    assert not ask(tmp_path, CRASHES, started, library_dir)


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"use_extra_bufts": "yes"}'])
def test_a_corrupt_cache_is_decided_anew(tmp_path: Path, started: Path, library_dir: Path, content: str) -> None:
    ask(tmp_path, FINE, started, library_dir)
    (path,) = tmp_path.glob("canary-*.json")
    path.write_text(content, encoding="utf-8")
    assert ask(tmp_path, FINE, started, library_dir)
    assert num_children(started) == 2
    assert json.loads(path.read_text(encoding="utf-8")) == {"use_extra_bufts": True}


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path, started: Path, library_dir: Path) -> None:
    occupied = tmp_path / "file"
    occupied.write_text("not a folder", encoding="utf-8")
    for _ in range(2):
        assert ask(occupied, FINE, started, library_dir)
    assert num_children(started) == 2


def test_without_llama_cpp_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LLAMA_CPP_LIB_PATH", raising=False)
    monkeypatch.setattr(canary.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(MissingDependencyError, match="pip install llama-cpp-python"):
        use_extra_bufts(tmp_path)


def test_the_real_child_decodes_both_ways_and_says_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTHONWARNINGS", "error")
    monkeypatch.setenv("PYTHONPATH", "relative")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "llama_cpp.py").write_text("raise SystemError('the wrong one')", encoding="utf-8")
    assert canary._failure(canary.CHILD, 60.0) is None
    assert canary._failure([*canary.CHILD, "--no-extra-bufts"], 60.0) is None
    assert canary.main([]) == 0
    assert capfd.readouterr() == ("", "")


def test_the_model_is_what_the_script_makes(tmp_path: Path) -> None:
    from tests.verifiers.make_canary import make

    make(tmp_path / "canary.gguf")
    assert (tmp_path / "canary.gguf").read_bytes() == MODEL.read_bytes()
    assert MODEL.stat().st_size < 64 * 1024
