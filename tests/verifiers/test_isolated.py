"""IsolatedVerifier with the real child: what crosses, and what happens when the child dies, hangs or is left alone."""

from __future__ import annotations

import collections.abc as abc
import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest

from edgespec.errors import (
    BackendError,
    ClosedError,
    EdgespecError,
    MissingDependencyError,
    ModelFormatError,
    ModelNotFoundError,
    ParameterError,
)
from edgespec.text.tokenizer import Tokenizer
from edgespec.verifiers import isolated, isolated_process
from edgespec.verifiers.base import Interrupted, Rows, ScoreRequest, Verifier
from edgespec.verifiers.canary import MODEL
from edgespec.verifiers.isolated import IsolatedVerifier
from edgespec.verifiers.isolated_wire import Kind, pack_requests
from edgespec.verifiers.llama import LlamaOptions, LlamaVerifier
from tests.verifiers.contract import VerifierContract, row_at

OPTIONS = LlamaOptions(MODEL, num_threads=1, num_ctx=256, num_slots=2, num_batch=100)
TOKENS = [int(token) for token in np.random.default_rng(0).integers(0, 64, 200)]
CHILD = "edgespec.verifiers.isolated_child"


@pytest.fixture(scope="module")
def opened() -> abc.Iterator[list[IsolatedVerifier]]:
    opened: list[IsolatedVerifier] = []
    yield opened
    for verifier in opened:
        verifier.close()


class TestIsolatedVerifier(VerifierContract):
    tolerance = 0.05

    @pytest.fixture
    def verifier(self, opened: list[IsolatedVerifier]) -> Verifier:
        """One for all tests, until one of them closes it."""
        if not opened or opened[-1].pid is None:
            opened.append(IsolatedVerifier(LlamaOptions(MODEL, num_threads=1, num_slots=2)))
        return opened[-1]


@pytest.fixture(scope="module")
def shared() -> abc.Iterator[IsolatedVerifier]:
    """For tests that leave it as they found it, or start its child anew."""
    with contextlib.closing(IsolatedVerifier(OPTIONS)) as verifier:
        yield verifier


@pytest.fixture(scope="module")
def expected() -> Rows:
    """Rows after the last five of 100 tokens, from this process."""
    with contextlib.closing(LlamaVerifier(OPTIONS)) as verifier:
        return row_at(verifier, TOKENS[:100], 5)


def end_child(verifier: IsolatedVerifier, number: int) -> None:
    assert verifier.pid is not None
    os.kill(verifier.pid, number)


def wait_until_gone(pid: int) -> bool:
    for _ in range(400):
        if not psutil.pid_exists(pid):
            return True
        time.sleep(0.05)
    return False


# What crosses


def test_it_says_and_scores_what_a_verifier_of_this_process_does(shared: IsolatedVerifier, expected: Rows) -> None:
    assert np.array_equal(row_at(shared, TOKENS[:100], 5), expected)
    with contextlib.closing(LlamaVerifier(OPTIONS)) as here:
        for name in ("num_vocab", "num_ctx", "num_slots", "num_ctx_train", "description"):
            assert getattr(shared, name) == getattr(here, name)
    assert [device.name for device in shared.devices if device.kind == "cpu"] == ["CPU"]


def test_rows_that_do_not_fit_one_message_are_all_valid(shared: IsolatedVerifier) -> None:
    with contextlib.closing(LlamaVerifier(OPTIONS)) as here:
        requests = [ScoreRequest(1, TOKENS, 150), ScoreRequest(0, TOKENS[:130], 20)]
        wanted = [rows.copy() for rows in here.score(requests)]
    for rows, other in zip(shared.score(requests), wanted, strict=True):
        np.testing.assert_allclose(rows, other, atol=0.05)


def test_only_tokens_that_changed_are_sent(shared: IsolatedVerifier, monkeypatch: pytest.MonkeyPatch) -> None:
    row_at(shared, TOKENS[:100])
    sizes = []
    pack = pack_requests

    def packed(requests: abc.Sequence[ScoreRequest], num_kept: abc.Sequence[int]) -> bytes:
        sizes.append(len(pack(requests, num_kept)))
        return pack(requests, num_kept)

    monkeypatch.setattr(isolated, "pack_requests", packed)
    row_at(shared, [*TOKENS[:99], 1, 2, 3])
    assert sizes == [4 * (1 + 4 + 3)]


def test_a_prompt_is_given_up_when_asked_and_the_next_score_is_right(shared: IsolatedVerifier, expected: Rows) -> None:
    row_at(shared, [63])
    num_asked = 0

    def cancelled() -> bool:
        nonlocal num_asked
        num_asked += 1
        if num_asked == 2:  # the first True has reached the child by now
            end_child(shared, signal.SIGCONT)
        return True

    end_child(shared, signal.SIGSTOP)
    with pytest.raises(Interrupted):
        shared.score([ScoreRequest(0, TOKENS, 1)], cancelled)
    assert np.allclose(row_at(shared, TOKENS[:100], 5), expected, atol=0.05)


def test_a_short_score_is_never_given_up(shared: IsolatedVerifier) -> None:
    assert row_at(shared, TOKENS[:5]).shape == (1, 64)
    (rows,) = shared.score([ScoreRequest(0, TOKENS[:6], 1)], lambda: True)
    assert np.isfinite(rows).all()


def test_its_model_is_a_vocabulary(tiny_gguf: Path) -> None:
    with contextlib.closing(IsolatedVerifier(LlamaOptions(tiny_gguf, num_threads=1))) as verifier:
        tokenizer = Tokenizer(verifier.model)
        assert tokenizer.num_vocab == verifier.num_vocab == 320
        tokens = tokenizer.encode("the and", add_special=False, parse_special=False)
        assert b"".join(map(tokenizer.piece, tokens)) == b"the and"
    with pytest.raises(ClosedError):
        verifier.model  # noqa: B018


def test_threads_can_be_set_and_survive_the_child(shared: IsolatedVerifier, expected: Rows) -> None:
    shared.set_threads(2, 1)
    with pytest.raises(ParameterError, match="num_threads: got 0"):
        shared.set_threads(0)
    assert np.allclose(row_at(shared, TOKENS[:100], 5), expected, atol=0.05)
    assert (shared._options.num_threads, shared._options.num_threads_batch) == (2, 1)


@pytest.mark.parametrize(
    ("content", "kind"),
    [(None, ModelNotFoundError), (b"GGUF and then nothing", ModelFormatError), (b"x", ModelFormatError)],
)
def test_the_childs_errors_are_raised_here(content: bytes | None, kind: type[EdgespecError], tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(kind) as there:
        IsolatedVerifier(replace(OPTIONS, path=path))
    with pytest.raises(kind) as here:
        LlamaVerifier(replace(OPTIONS, path=path))
    assert str(there.value) == str(here.value)


def test_a_device_the_child_does_not_have_is_refused() -> None:
    with pytest.raises(ParameterError, match=r"device: got 'CUDA7'; llama\.cpp has here: CPU"):
        IsolatedVerifier(replace(OPTIONS, devices=("CUDA7",)))


def test_the_childs_warnings_are_logged_here(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "edgespec"), contextlib.closing(IsolatedVerifier(OPTIONS)):
        assert "256 tokens is more than the 64" in caplog.text


def test_a_relative_path_is_this_process_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here.gguf").symlink_to(MODEL)
    (tmp_path / "llama_cpp.py").write_text("raise SystemError('the wrong one')", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    with contextlib.closing(IsolatedVerifier(replace(OPTIONS, path=Path("here.gguf")))) as verifier:
        assert verifier.num_vocab == 64


# Faults


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM])
def test_a_child_that_dies_is_an_error_and_the_next_score_has_another(
    shared: IsolatedVerifier, expected: Rows, number: signal.Signals
) -> None:
    row_at(shared, [1])
    end_child(shared, number)
    with pytest.raises(BackendError, match=rf"process died \(killed by signal {int(number)} \({number.name}\)\)"):
        shared.score([ScoreRequest(0, TOKENS[:99], 1)])
    assert shared.pid is None
    assert np.array_equal(row_at(shared, TOKENS[:100], 5), expected)


def test_a_child_that_dies_during_a_score_is_an_error(shared: IsolatedVerifier) -> None:
    row_at(shared, [1])

    def cancelled() -> bool:
        end_child(shared, signal.SIGKILL)
        return False

    end_child(shared, signal.SIGSTOP)
    with pytest.raises(BackendError, match="SIGKILL"):
        shared.score([ScoreRequest(0, TOKENS, 1)], cancelled)


def test_a_silent_child_is_ended(shared: IsolatedVerifier, expected: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    row_at(shared, [1])
    assert shared._child is not None
    monkeypatch.setattr(shared._child, "_patience_s", 0.3)
    stopped = shared.pid
    end_child(shared, signal.SIGSTOP)
    with pytest.raises(BackendError, match=r"no sign of life for 0\.3 s and was ended; check its device"):
        shared.score([ScoreRequest(0, TOKENS, 1)])
    assert stopped is not None
    assert not psutil.pid_exists(stopped)
    assert np.array_equal(row_at(shared, TOKENS[:100], 5), expected)


def test_a_silent_child_is_ended_soon_once_nobody_waits(
    shared: IsolatedVerifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    row_at(shared, [1])
    monkeypatch.setattr(isolated_process, "CANCELLED_S", 0.3)
    end_child(shared, signal.SIGSTOP)
    with pytest.raises(BackendError, match=r"no sign of life for 0\.3 s and was ended"):
        shared.score([ScoreRequest(0, TOKENS, 1)], lambda: True)


def test_a_silent_child_that_does_not_even_read_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    with contextlib.closing(IsolatedVerifier(replace(OPTIONS, num_ctx=400_000), patience_s=60.0)) as verifier:
        assert verifier._child is not None
        monkeypatch.setattr(verifier._child, "_patience_s", 0.3)
        end_child(verifier, signal.SIGSTOP)
        with pytest.raises(BackendError, match="no sign of life"):
            verifier.score([ScoreRequest(0, [1] * 390_000, 1)])


def test_signs_of_life_are_waited_for() -> None:
    """A prompt that takes three times the patience, the child being stopped again and again, each time for less."""
    with contextlib.closing(IsolatedVerifier(replace(OPTIONS, num_ctx=10_000, num_slots=1))) as verifier:
        child = verifier._child
        assert child is not None
        child._patience_s = 10 * isolated_process.POLL_S
        num_asked = 0

        def cancelled() -> bool:
            nonlocal num_asked
            num_asked += 1
            if num_asked % 5 == 0 and num_asked <= 30:
                beats = child.memory.beats
                end_child(verifier, signal.SIGCONT)
                while child.memory.beats == beats:
                    time.sleep(0.001)
                if num_asked < 30:
                    end_child(verifier, signal.SIGSTOP)
            return False

        end_child(verifier, signal.SIGSTOP)
        (rows,) = verifier.score([ScoreRequest(0, TOKENS * 50, 1)], cancelled)
        assert num_asked >= 30
        assert np.isfinite(rows).all()


def test_an_abort_of_the_library_comes_with_its_last_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolated, "check_reachable", lambda endpoints: None)
    with pytest.raises(BackendError) as caught:
        IsolatedVerifier(OPTIONS, ["127.0.0.1:1"])
    assert str(caught.value) == (
        "the verifier's process died (killed by signal 6 (SIGABRT), Failed to connect to 127.0.0.1:1); "
        "check the workers: 127.0.0.1:1"
    )


def test_a_child_that_does_not_start_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolated_process, "COMMAND", (sys.executable, "-c", "import no_such_module"))
    with pytest.raises(
        BackendError, match=r"died \(exit code 1, ModuleNotFoundError: No module named 'no_such_module'"
    ):
        IsolatedVerifier(OPTIONS)
    monkeypatch.setattr(isolated_process, "COMMAND", ("/no/such/python",))
    with pytest.raises(BackendError, match="cannot start the verifier's process: No such file or directory"):
        IsolatedVerifier(OPTIONS)


def test_a_mistake_of_the_program_in_the_child_is_not_hidden(shared: IsolatedVerifier) -> None:
    row_at(shared, [1])
    assert shared._child is not None
    with pytest.raises(BackendError, match=r"exit code 1, .*KeyError"):
        shared._ask(Kind.DONE, b"")
    assert np.isfinite(row_at(shared, [1])).all()


def test_an_exception_while_waiting_starts_another_child(shared: IsolatedVerifier, expected: Rows) -> None:
    row_at(shared, [1])

    def cancelled() -> bool:
        raise KeyboardInterrupt

    end_child(shared, signal.SIGSTOP)
    child = shared.pid
    with pytest.raises(KeyboardInterrupt):
        shared.score([ScoreRequest(0, TOKENS, 1)], cancelled)
    assert child is not None
    assert not psutil.pid_exists(child)
    assert np.array_equal(row_at(shared, TOKENS[:100], 5), expected)


def test_a_model_that_was_replaced_is_an_error(tiny_gguf: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.symlink_to(MODEL)
    with contextlib.closing(IsolatedVerifier(replace(OPTIONS, path=path))) as verifier:
        path.unlink()
        path.symlink_to(tiny_gguf)
        end_child(verifier, signal.SIGKILL)
        for match in ("SIGKILL", "replaced by another model", "replaced by another model"):
            with pytest.raises(BackendError, match=match):
                verifier.score([ScoreRequest(0, [1], 1)])


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_child_ends_with_its_parent_even_in_a_score(number: signal.Signals) -> None:
    code = (
        "from edgespec.verifiers.isolated import *; from edgespec.verifiers.canary import MODEL\n"
        "v = IsolatedVerifier(LlamaOptions(MODEL, num_threads=1, num_ctx=100_000))\n"
        "print(v.pid, flush=True)\n"
        "v.score([isolated.ScoreRequest(0, [1, 2] * 50_000, 1)])\n"
    ).replace("isolated.Score", "Score")
    root = Path(__file__).parents[2]
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=root) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert CHILD in psutil.Process(child).cmdline()
        parent.send_signal(number)
        parent.wait()
        assert wait_until_gone(child)


def test_nothing_stays_behind() -> None:
    here = psutil.Process()

    def held() -> tuple[int, int, set[Path]]:
        return here.num_fds(), len(here.children()), {*Path("/dev/shm").glob("*")}

    IsolatedVerifier(OPTIONS).close()
    before = held()
    for number in (None, signal.SIGKILL, signal.SIGSTOP):
        verifier = IsolatedVerifier(OPTIONS)
        rows = row_at(verifier, TOKENS[:5])
        if number is not None:
            end_child(verifier, number)
        verifier.close()
        verifier.close()
        assert np.isfinite(rows).all()
        del verifier, rows
    assert held() == before


def test_workers_without_rpc_are_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    from edgespec.verifiers import llama_rpc

    monkeypatch.setattr(llama_rpc, "supports_rpc", lambda: False)
    with pytest.raises(MissingDependencyError, match=r'rebuild it: CMAKE_ARGS="-DGGML_RPC=ON '):
        IsolatedVerifier(OPTIONS, ["127.0.0.1:1"])


@pytest.mark.parametrize("patience_s", [0.0, -1.0, float("nan")])
def test_patience_must_be_a_time(patience_s: float) -> None:
    with pytest.raises(ParameterError, match="patience_s"):
        IsolatedVerifier(OPTIONS, patience_s=patience_s)


def test_the_error_logged_before_an_abort_is_among_the_last_words() -> None:
    code = (
        "import ctypes; from edgespec.verifiers.llama_library import *; explain_aborts(); native_log().acquire()\n"
        "native_log()._keep(4, b'ggml_cuda: device lost', None)\n"
        "abort = native('ggml_abort', [ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p], None)\n"
        "abort(b'/src/x.cpp', 7, b'CUDA\\nerror')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, cwd=Path(__file__).parents[2], check=False)
    assert done.returncode == -signal.SIGABRT
    assert done.stderr == b"/src/x.cpp:7: CUDA error; device lost\n"
