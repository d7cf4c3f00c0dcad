"""Whether llama.cpp's repacked weights work here, found out in a child process, where a crash hurts nobody.

Some compilers miscompile ggml's AMX kernels: the first decode then dies with a general protection fault
(ggml-org/llama.cpp#26954, #20824). A build cannot be asked, it can only be tried. The child decodes with the tiny model
beside this file, whose matrices are of the kinds and shapes that get repacked (tests/verifiers/make_canary.py).
"""

from __future__ import annotations

import argparse
import collections.abc as abc
import contextlib
import hashlib
import importlib.util
import json
import logging
import os
import platform
import signal
import subprocess
import sys
import tempfile
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np

from edgespec.errors import BackendError, MissingDependencyError
from edgespec.verifiers.child import FOLDER, KILLED, environment, how_it_ended, last_line, leave_no_core

logger = logging.getLogger("edgespec")

MODEL = Path(__file__).with_name("canary.gguf")
CHILD = (sys.executable, "-m", "edgespec.verifiers.canary")
TIMEOUT_S = 60.0
NOT_FINITE = "the logits are not finite"
# Failures that say something of the build. Any other (no answer in time, out of memory, ended by somebody) may be of
# the moment and is not remembered.
CRASHES = tuple(
    f"{KILLED} {int(getattr(signal, name))} "
    for name in ("SIGSEGV", "SIGILL", "SIGBUS", "SIGABRT", "SIGFPE")
    if hasattr(signal, name)
)
CERTAIN = (*CRASHES, NOT_FINITE)
# Lines of /proc/cpuinfo that say what a CPU can do: x86-64, then aarch64.
CPU_LINES = ("vendor_id", "model name", "flags", "CPU implementer", "CPU part", "Features")
# What is tried are the CPU's kernels: the child sees no GPU.
SETTINGS = {"CUDA_VISIBLE_DEVICES": "-1", "HIP_VISIBLE_DEVICES": "-1", "GGML_VK_VISIBLE_DEVICES": ""}


def use_extra_bufts(
    cache_dir: Path,
    *,
    command: abc.Sequence[str] = CHILD,
    timeout_s: float = TIMEOUT_S,
    library_dir: Path | None = None,
) -> bool:
    """Whether a verifier may be loaded with ``use_extra_bufts``; the answer is kept in ``cache_dir`` for the next time.

    command      starts the child; ``--no-extra-bufts`` is added for the second try
    timeout_s    how long one child may take
    library_dir  where llama.cpp's shared libraries lie; None: llama-cpp-python's

    The answer holds for one set of libraries on one kind of CPU. A cache that cannot be read or written only costs the
    trial, about a second. No means slower, and is logged as a warning once per process, with the command that rebuilds
    the library. Raises BackendError when it decodes neither way, MissingDependencyError when it is not installed.
    """
    key = _key(library_dir or _library_dir())
    path = cache_dir / f"canary-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"
    known = _read(path)
    failure = _decide(command, timeout_s) if known is None else known
    if known is None and (not failure or failure.startswith(CERTAIN)):
        _write(path, failure)
    if failure:
        _warn_once(failure)
    return not failure


def build_identity() -> str:
    """Another text for another build of llama.cpp or another kind of CPU. Raises MissingDependencyError."""
    return hashlib.sha256(_key(_library_dir()).encode()).hexdigest()[:16]


def _decide(command: abc.Sequence[str], timeout_s: float) -> str:
    """What happens with repacked weights: "" where they work."""
    failure = _failure(command, timeout_s)
    if failure is None:
        return ""
    plain_failure = _failure([*command, "--no-extra-bufts"], timeout_s)
    if plain_failure is None:
        return failure
    raise BackendError(
        f"this build of llama.cpp cannot decode: {failure}; without repacked weights: {plain_failure}; "
        f"rebuild it: {rebuild_command()}"
    )


def rebuild_command(*options: str) -> str:
    """The shell command that builds the installed llama-cpp-python again, without the miscompiled AMX kernels.

    options  more for CMake, such as "-DGGML_RPC=ON"
    """
    flags = "-fno-tree-dse -fno-dse"
    chosen = " ".join([*options, f"-DCMAKE_C_FLAGS='{flags}'", f"-DCMAKE_CXX_FLAGS='{flags}'"])
    return f'CMAKE_ARGS="{chosen}" pip install --force-reinstall --no-cache-dir --no-deps {_requirement()}'


@cache
def _warn_once(failure: str) -> None:
    logger.warning(
        "llama.cpp as built here cannot use repacked weights on this CPU (%s); they are off, which is slower; rebuild "
        "it, adding the CMAKE_ARGS you built it with: %s",
        failure,
        rebuild_command(),
    )


def _failure(command: abc.Sequence[str], timeout_s: float) -> str | None:
    """What the child died of, in words; None where it decoded."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout_s,
            env=environment(SETTINGS),
            cwd=FOLDER,
            start_new_session=True,  # a Ctrl-C is meant for the parent, and would look like a crash
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"no answer in {timeout_s:g} s"
    except OSError as error:
        return f"{command[0]} does not start: {error.strerror}"
    ended = how_it_ended(done.returncode)
    if done.returncode < 0:
        return ended
    return ", ".join([*last_line(done.stderr), ended]) if done.returncode else None


def _key(library_dir: Path) -> str:
    files = [*sorted(library_dir.iterdir()), MODEL] if library_dir.is_dir() else [MODEL]
    stats = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return json.dumps([stats, _cpu()])


def _library_dir() -> Path:
    chosen = os.environ.get("LLAMA_CPP_LIB_PATH")  # llama-cpp-python's own switch
    if chosen:
        return Path(chosen)
    spec = importlib.util.find_spec("llama_cpp")
    if spec is None or spec.origin is None:
        raise MissingDependencyError("llama-cpp-python is not installed; pip install llama-cpp-python")
    return Path(spec.origin).parent / "lib"


def _requirement() -> str:
    try:
        return f"llama-cpp-python=={version('llama-cpp-python')}"
    except PackageNotFoundError:
        return "llama-cpp-python"


def _cpu() -> list[str]:
    """What identifies the kind of CPU; one core speaks for all."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return [platform.machine(), platform.processor()]
    found = {line.split(":")[0].strip(): line for line in reversed(lines) if line.startswith(CPU_LINES)}
    return [platform.machine(), *(found[name] for name in sorted(found))]


def _read(path: Path) -> str | None:
    """The failure that was noted, "" for none; None where nothing was."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        works, failure = content["use_extra_bufts"], content.get("failure", "")
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    if not isinstance(works, bool) or not isinstance(failure, str) or works == bool(failure):
        return None
    return failure


def _write(path: Path, failure: str) -> None:
    """Whole or not at all; an answer that cannot be kept is asked for again."""
    content = {"use_extra_bufts": False, "failure": failure} if failure else {"use_extra_bufts": True}
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".tmp")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(content, file)
        Path(name).replace(path)


def main(arguments: abc.Sequence[str] | None = None) -> int:
    """The child: decode one prompt and one token. Silent, and 0, where all went well."""
    parser = argparse.ArgumentParser(prog="edgespec.verifiers.canary")
    parser.add_argument("--no-extra-bufts", action="store_true", help="with plain weights")
    chosen = parser.parse_args(arguments)
    leave_no_core()
    return _decode(use_extra_bufts=not chosen.no_extra_bufts)


def _decode(*, use_extra_bufts: bool) -> int:
    from edgespec.verifiers.base import ScoreRequest
    from edgespec.verifiers.llama import LlamaOptions, LlamaVerifier

    options = LlamaOptions(MODEL, num_threads=2, num_ctx=64, num_gpu_layers=0, use_extra_bufts=use_extra_bufts)
    with contextlib.closing(LlamaVerifier(options)) as verifier:
        for num_tokens, num_rows in ((8, 8), (9, 1)):
            (rows,) = verifier.score([ScoreRequest(0, list(range(num_tokens)), num_rows)])
            if not np.isfinite(rows).all():
                print(NOT_FINITE, file=sys.stderr)
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
