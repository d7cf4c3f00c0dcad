"""Ctrl-C and other signals while a pair is measured: what was opened is freed soon, and nothing half made stays."""

from __future__ import annotations

import collections.abc as abc
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edgespec import calibration
from edgespec.calibration import measuring
from edgespec.drafters.onnx import OnnxDrafter
from edgespec.engine.calibrate import QUICK
from edgespec.verifiers.llama import LlamaVerifier
from tests.opening.pairs import open_auto
from tests.test_loading import assert_no_owner_is_left

ROOT = Path(__file__).parents[2]
TOO_LONG_S = 10.0  # to be measured, if nothing interrupted it


@pytest.fixture
def ctrl_c() -> abc.Iterator[abc.Callable[[], None]]:
    """Presses it. It is listened to: whoever runs the tests in the background makes them ignore it."""
    main = threading.main_thread().ident
    assert main is not None
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield lambda: signal.pthread_kill(main, signal.SIGINT)
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was closed."""
    names: list[str] = []

    def note(kind: type[Any]) -> None:
        close = kind.close

        def noted(self: Any) -> None:
            names.append(kind.__name__)
            close(self)

        monkeypatch.setattr(kind, "close", noted)

    note(LlamaVerifier)
    note(OnnxDrafter)
    return names


@pytest.mark.skipif(sys.platform == "win32", reason="Windows cannot send a signal to a thread")
def test_ctrl_c_while_it_is_measured_frees_everything_soon(
    tiny_gguf: Path,
    own_folder: Path,
    own_cache: Path,
    ctrl_c: abc.Callable[[], None],
    closed: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(measuring, "QUICK", replace(QUICK, repeats=10**9))
    monkeypatch.setattr(measuring, "QUICK_S", TOO_LONG_S)
    quick = calibration.quick

    def interrupted(*arguments: Any, **options: Any) -> Any:
        threading.Timer(0.2, ctrl_c).start()
        return quick(*arguments, **options)

    monkeypatch.setattr(calibration, "quick", interrupted)
    with pytest.raises(KeyboardInterrupt):
        open_auto(tiny_gguf, own_folder)
    assert_no_owner_is_left()
    assert set(closed) == {"LlamaVerifier", "OnnxDrafter"}
    assert not (own_cache / "calibration").exists()


@pytest.mark.skipif(sys.platform == "win32", reason="Windows cannot send a signal to a thread")
@pytest.mark.parametrize("kind", [LlamaVerifier, OnnxDrafter])
def test_ctrl_c_while_a_model_is_loaded_frees_what_it_comes_to(
    tiny_gguf: Path,
    own_folder: Path,
    ctrl_c: abc.Callable[[], None],
    closed: list[str],
    monkeypatch: pytest.MonkeyPatch,
    kind: type[Any],
) -> None:
    opened, returned = kind.__init__, threading.Event()

    def slow(self: Any, *arguments: Any) -> None:
        ctrl_c()
        returned.wait(30)
        opened(self, *arguments)

    monkeypatch.setattr(kind, "__init__", slow)
    with pytest.raises(KeyboardInterrupt):
        open_auto(tiny_gguf, own_folder)
    assert closed == []
    returned.set()
    assert_no_owner_is_left()
    assert set(closed) == {"LlamaVerifier", "OnnxDrafter"}


SCRIPT = f"""
import sys
from dataclasses import replace
from edgespec import calibration
from edgespec.calibration import measuring
from edgespec.cli.main import main
quick = calibration.quick
measuring.QUICK, measuring.QUICK_S = replace(measuring.QUICK, repeats=10**9), {TOO_LONG_S}
def told(*arguments, **options):
    print("measuring", file=sys.stderr, flush=True)
    return quick(*arguments, **options)
calibration.quick = told
main()
"""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows cannot send SIGINT to another process alone")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_command_that_is_interrupted_while_it_measures_ends_cleanly(
    tiny_gguf: Path, own_folder: Path, own_cache: Path, number: int, code: int
) -> None:
    def listen() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    models = ("--verifier", str(tiny_gguf), "--draft", str(own_folder), "--threads", "1")
    command = [sys.executable, "-c", SCRIPT, "run", "the", *models]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=listen
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert b"measuring\n" in iter(process.stderr.readline, b"")
        process.send_signal(number)
        out, err = process.stdout.read(), process.stderr.read()
        assert process.wait(60) == code
    assert (out, err.strip()) == (b"", b"")
    assert not (own_cache / "calibration").exists()
