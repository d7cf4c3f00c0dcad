"""What the doctor is to look at, and what it knows of it so far."""

from __future__ import annotations

import collections.abc as abc
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from edgespec.devices.probe import Box
from edgespec.devices.profile import Profile
from edgespec.devices.sizes import ModelShape
from edgespec.loading import profiled_mode
from edgespec.pairs import Pair
from edgespec.verifiers.child import environment

_T = TypeVar("_T")
Progress = abc.Callable[[str, float], None]
TIMEOUT_S = 120.0
TRIAL_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class Job:
    """The options of `edgespec run` that decide whether it runs, by its names.

    deep  also read all files against their SHA-256, and answer a prompt
    """

    pair: str | None = None
    verifier: Path | None = None
    draft: str | None = None
    profile: str | None = None
    context: int | None = None
    threads: int | None = None
    mode: str | None = None
    rpc: tuple[str, ...] = ()
    deep: bool = False

    def arguments(self) -> list[str]:
        """For the command line, from the same folder."""
        names = ("pair", "verifier", "draft", "profile", "context", "threads", "mode")
        values = {f"--{name}": getattr(self, name) for name in names}
        given = [str(part) for option, value in values.items() if value is not None for part in (option, value)]
        return given + [part for worker in self.rpc for part in ("--rpc", worker)]


@dataclass(slots=True)
class Case:
    """What the checks find out for those after them. None: not known, and what needs it is left out."""

    job: Job
    progress: Progress
    llama: bool | None = None
    providers: tuple[str, ...] | None = None
    profile: Profile | None = None
    box: Box | None = None
    pair: Pair | None = None
    gguf: Path | None = None
    verifier: ModelShape | None = None
    draft: str | Path | None = None  # a folder or file, "lookup" or "none"
    draft_shape: ModelShape | None = None

    @staticmethod
    def known(value: _T | None) -> _T:
        """What an earlier check found out; a check names in its ``needs`` what it asks for."""
        if value is None:
            raise RuntimeError("not known yet")
        return value

    @property
    def mode(self) -> str:
        """As `edgespec run` would choose it."""
        if self.job.mode is not None:
            return self.job.mode
        if self.job.draft == "none":
            return "plain"
        return "auto" if self.profile is None else profiled_mode(self.profile, self.job.draft)

    @property
    def draft_model(self) -> Path | None:
        """Where one is wanted and there."""
        return self.draft if isinstance(self.draft, Path) else None


def child(arguments: abc.Sequence[str], timeout_s: float = TIMEOUT_S) -> subprocess.CompletedProcess[bytes]:
    """Run a Python of its own. Raises TimeoutExpired."""
    return subprocess.run(
        [sys.executable, *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=timeout_s,
        env=environment({"PYTHONSAFEPATH": "1"}),  # a folder named llama_cpp where the user stands is not imported
        start_new_session=True,
        check=False,
    )
