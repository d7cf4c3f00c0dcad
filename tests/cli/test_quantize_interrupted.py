"""``edgespec quantize`` in a process of its own: what a signal, a kill or a full disk leaves behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.terminal import names
from tests.tiny import TinyConfig, write_gguf

pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals and limits of POSIX")


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that takes a moment."""
    config = TinyConfig(num_vocab=6000, width=512, num_layers=6, num_hidden=1024)
    return write_gguf(tmp_path_factory.mktemp("slow") / "slow.gguf", config)


def started(
    *arguments: str | Path, limit: int | None = None, environment: dict[str, str] | None = None
) -> subprocess.Popen[str]:
    """The command in a process of its own, with at most so many bytes a file."""

    def prepare() -> None:
        for number in (signal.SIGINT, signal.SIGHUP):  # whoever runs the tests in the background has them ignored
            signal.signal(number, signal.SIG_DFL)
        if limit is not None:
            import resource

            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    line = [sys.executable, "-m", "edgespec", "quantize", *map(str, arguments)]
    return subprocess.Popen(
        line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=prepare, env=environment
    )


def wait_for(stage: str, process: subprocess.Popen[str]) -> None:
    assert process.stderr is not None
    for line in process.stderr:
        if stage in line:
            return
    raise AssertionError(f"it never said {stage!r}")


def work(what: str, slow: Path, out: Path) -> tuple[str | Path, ...]:
    if what == "pair":
        return ("pair", "--verifier", slow, "--draft", slow, "--profile", "auto", "--out", out)
    return (what, slow, "--out", out, *(("--type", "Q4_K_M") if what == "verifier" else ()))


@pytest.mark.parametrize("what", ["draft", "verifier", "pair"])
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_signal_leaves_nothing(name: str, what: str, slow: Path, tmp_path: Path) -> None:
    number = getattr(signal, name)
    with started(*work(what, slow, tmp_path / "out")) as process:
        wait_for("quantizing", process)
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number, err
    assert out == ""
    assert "Traceback" not in err
    assert names(tmp_path) == set()


@pytest.mark.parametrize("what", ["draft", "verifier", "pair"])
def test_a_kill_leaves_no_output_and_the_next_run_tidies_up(what: str, slow: Path, tmp_path: Path) -> None:
    with started(*work(what, slow, tmp_path / "out")) as process:
        wait_for("quantizing", process)
        process.kill()
        process.communicate(timeout=60)
    assert not (tmp_path / "out").exists()
    with started(*work(what, slow, tmp_path / "out")) as process:
        _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert names(tmp_path) == {"out"}


@pytest.mark.parametrize("what", ["draft", "verifier", "pair"])
def test_a_full_disk_leaves_nothing(what: str, slow: Path, tmp_path: Path) -> None:
    with started(*work(what, slow, tmp_path / "out"), limit=1_000_000) as process:
        out, err = process.communicate(timeout=120)
    assert process.returncode == 5, err
    assert out == ""
    assert "space" in err.splitlines()[-1]
    assert names(tmp_path) == set()


def test_a_command_in_a_process_of_its_own(slow: Path, tmp_path: Path) -> None:
    with started("verifier", slow, "--out", tmp_path / "q.gguf", "--type", "Q8_0", "--json") as process:
        out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert json.loads(out)["path"] == str(tmp_path / "q.gguf")
    assert "quantizing" in err


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_a_head_that_is_being_chosen_leaves_nothing_either(name: str, slow: Path, tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    environment = {**os.environ, "TMPDIR": str(tmp_path / "scratch")}
    with started(*work("draft", slow, tmp_path / "out"), "--head-vocab", "500", environment=environment) as process:
        wait_for("writing text", process)
        process.send_signal(getattr(signal, name))
        _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + getattr(signal, name), err
    assert names(tmp_path) == {"scratch"}
    assert names(tmp_path / "scratch") == set()
