"""What the processes that the verifiers start have in common: their environment, and how they end."""

from __future__ import annotations

import collections.abc as abc
import contextlib
import os
import signal
from pathlib import Path

KILLED = "killed by signal"
# A child's environment is this process's, without what makes Python itself talk, wait or fail. It starts in another
# folder (``FOLDER``), since one named llama_cpp where the user stands would be imported; relative paths are therefore
# made absolute.
DROPPED = ("PYTHONINSPECT", "PYTHONWARNINGS", "PYTHONDEVMODE", "PYTHONVERBOSE", "PYTHONFAULTHANDLER")
PATHS = ("PYTHONPATH", "LLAMA_CPP_LIB_PATH")
ROOT = Path(__file__).parents[2]
FOLDER = Path(ROOT.anchor)


def environment(settings: abc.Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a child, with ``settings`` beside it."""
    chosen = {name: value for name, value in os.environ.items() if name not in DROPPED}
    chosen["GGML_NO_BACKTRACE"] = "1"  # ggml would call a debugger before it aborts
    for name in PATHS:
        places = [str(Path(place).resolve()) for place in chosen.get(name, "").split(os.pathsep) if place]
        if name == "PYTHONPATH":
            places.append(str(ROOT))
        if places:
            chosen[name] = os.pathsep.join(places)
    return chosen | dict(settings or {})


def how_it_ended(code: int) -> str:
    """A return code of subprocess in words: the exit code, or the signal."""
    if code >= 0:
        return f"exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = "unknown"
    return f"{KILLED} {-code} ({name})"


def last_line(text: bytes) -> list[str]:
    """The last line a child said; none where it said nothing."""
    return text.decode("utf-8", "replace").strip().splitlines()[-1:]


def leave_no_core() -> None:
    """A crash is an answer to the parent, not a case for a core dump."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
