"""Whatever ends llama.cpp's process, or its parent: one clear error, nothing half written, nobody left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

import quantize.verifier_process
from edgespec.errors import BackendError, FileAccessError, MissingDependencyError
from quantize.verifier import predicted_bytes, quantize_verifier
from tests.tiny import write_gguf

pytestmark = pytest.mark.skipif(os.name != "posix", reason="needs POSIX signals and limits")

WAIT_S = 30.0


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "source.gguf")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def replace_work(monkeypatch: pytest.MonkeyPatch, work: str) -> None:
    """Children that plan as ever, and then do ``work`` instead of converting."""
    code = (
        "import os, sys, time, quantize.verifier_child as child\n"
        f"def work(job):\n    {work}\n"
        "child._Job.quantize = work\n"
        "sys.exit(child.main())"
    )
    monkeypatch.setattr(quantize.verifier_process, "CHILD", (sys.executable, "-c", code))


def failure(source: Path) -> str:
    with pytest.raises(BackendError) as caught:
        quantize_verifier(source, source.with_name("out.gguf"), "Q8_0")
    assert names(source.parent) == ["source.gguf"]
    assert psutil.Process().children() == []
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_an_abort(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace_work(monkeypatch, "print('GGML_ASSERT(rows > 0) failed', file=sys.stderr, flush=True); os.abort()")
    message = failure(source)
    assert f"llama.cpp's process for {source} ended with signal 6 (SIGABRT)" in message
    assert "saying 'GGML_ASSERT(rows > 0) failed'" in message


def test_a_kill_as_when_memory_runs_out(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace_work(monkeypatch, "os.kill(os.getpid(), 9)")
    assert "ended with signal 9 (SIGKILL); try again, with more free memory" in failure(source)


def test_an_end_without_a_word(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace_work(monkeypatch, "os._exit(3)")
    assert "ended with exit code 3; try again" in failure(source)


def test_a_child_that_dies_before_it_is_told_anything(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantize.verifier_process, "CHILD", (sys.executable, "-c", "raise SystemExit('no')"))
    assert "ended with exit code 1, saying 'no'" in failure(source)


def test_a_child_that_does_not_start(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantize.verifier_process, "CHILD", (str(source.with_name("no-python")),))
    assert "no-python does not start: No such file or directory" in failure(source)


def test_lines_of_others_are_passed_over(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace_work(monkeypatch, "print('hello'); print('[1]'); print('{'); child._tell('tensor', 0); os._exit(3)")
    assert "exit code 3" in failure(source)


def test_a_library_that_does_not_load(source: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LLAMA_CPP_LIB_PATH", str(tmp_path / "nowhere"))
    with pytest.raises(MissingDependencyError, match="llama-cpp-python does not load: "):
        quantize_verifier(source, tmp_path / "out.gguf", "Q8_0")
    assert names(tmp_path) == ["source.gguf"]


def test_the_users_python_settings_do_not_reach_the_child(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTHONINSPECT", "PYTHONVERBOSE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("PYTHONWARNINGS", "error")
    monkeypatch.chdir(source.parent)
    for name in ("quantize", "llama_cpp", "json"):  # folders of the user's that are no packages of ours
        (source.parent / name).mkdir()
        (source.parent / name / "__init__.py").write_text("raise RuntimeError", encoding="utf-8")
    assert quantize_verifier(Path("source.gguf"), Path("out.gguf"), "Q8_0").is_file()


def test_names_of_any_kind(tmp_path: Path) -> None:
    source = write_gguf(tmp_path / 'a "quoted" näme\n🙂\udc80.gguf')
    out = quantize_verifier(source, tmp_path / "öut\udcff {}.gguf", "Q8_0")
    assert out.stat().st_size == pytest.approx(predicted_bytes(source, "Q8_0"), abs=300)


def test_ctrl_c_within_progress_ends_the_child(source: Path) -> None:
    def interrupt(stage: str, fraction: float) -> None:
        if stage == "quantizing":
            assert len(psutil.Process().children()) == 1
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize_verifier(source, source.with_name("out.gguf"), "Q8_0", progress=interrupt)
    assert names(source.parent) == ["source.gguf"]
    assert psutil.Process().children() == []


def parent(source: Path, before: str = "") -> subprocess.Popen[str]:
    """A process whose child tells its id and then works for as long as it lives."""
    work = "child._tell('tensor', 0); time.sleep(600)"
    code = f"""
import os, resource, sys
from pathlib import Path
import psutil, pytest
import quantize.verifier_process
from quantize.verifier import quantize_verifier
from tests.quantize.test_verifier_process import replace_work
def look(stage, fraction):
    if stage == "quantizing": print(psutil.Process().children()[0].pid, flush=True)
source = Path(sys.argv[1])
{before or f"replace_work(pytest.MonkeyPatch(), {work!r})"}
try:
    quantize_verifier(source, source.with_name("out.gguf"), "Q8_0", progress=look)
except Exception as error:
    print(type(error).__name__, error)
"""
    command = [sys.executable, "-c", code, str(source)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def ends(pid: int) -> bool:
    """Whether a process that is not ours ends soon."""
    deadline = time.monotonic() + WAIT_S
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def test_a_killed_parent_takes_the_child_with_it_and_the_next_one_cleans_up(source: Path) -> None:
    process = parent(source)
    child = int(first_line(process))
    assert psutil.pid_exists(child)
    process.kill()
    process.communicate(timeout=WAIT_S)
    assert ends(child)
    assert len(names(source.parent)) == 2
    quantize_verifier(source, source.with_name("out.gguf"), "Q8_0")
    assert names(source.parent) == ["out.gguf", "source.gguf"]


def test_ctrl_c_on_the_parent_leaves_nothing(source: Path) -> None:
    process = parent(source)
    child = int(first_line(process))
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=WAIT_S)
    assert process.returncode != 0
    assert ends(child)
    assert names(source.parent) == ["source.gguf"]


def test_a_full_disk_leaves_nothing(source: Path) -> None:
    process = parent(source, before="resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))")
    output, errors = process.communicate(timeout=WAIT_S)
    assert output.splitlines()[-1].startswith(FileAccessError.__name__), output + errors
    assert f"no more can be written to {source.parent}; free space" in output
    assert names(source.parent) == ["source.gguf"]
