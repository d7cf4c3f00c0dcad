"""The state of a training on disk: files that appear whole or not at all, and say by their name what they must hold.

``step-00000123-SHA256.checkpoint``; the newest two are kept. ``stable-…`` is the last one before the learning rate
began to decay, from which a longer training goes on.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from edgespec.errors import FileAccessError, ModelFormatError
from quantize.source import file_sha256

FORMAT = 1
SUFFIX = ".checkpoint"
NUM_KEPT = 2
_NAME = re.compile(r"(step|stable)-(\d{8})-([0-9a-f]{64})\.checkpoint")

Kind = Literal["step", "stable"]
State = dict[str, Any]  # tensors, numbers, texts, and lists and dicts of them


@dataclass(frozen=True, slots=True, order=True)
class Checkpoint:
    """A file that is there; the newer of two is the larger."""

    step: int
    kind: str
    path: Path
    sha256: str

    def is_whole(self) -> bool:
        return file_sha256(self.path) == self.sha256


def checkpoints(folder: Path) -> list[Checkpoint]:
    """Those of a folder, the oldest first; none where there is no folder."""
    if not folder.is_dir():
        return []
    matches = ((path, _NAME.fullmatch(path.name)) for path in folder.iterdir())
    return sorted(Checkpoint(int(m[2]), m[1], path, m[3]) for path, m in matches if m)


def newest(folder: Path, kind: Kind | None = None) -> Checkpoint | None:
    found = [checkpoint for checkpoint in checkpoints(folder) if kind in (None, checkpoint.kind)]
    return found[-1] if found else None


def save(folder: Path, step: int, state: State, kind: Kind = "step") -> Checkpoint:
    """Write a checkpoint, wait for the disk, and remove those it replaces: older ones beyond NUM_KEPT of its kind, and
    any of later steps, which belong to a training that was given up. Raises FileAccessError."""
    made = folder / f".{secrets.token_hex(8)}{SUFFIX}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with made.open("xb") as stream:
            torch.save({"format": FORMAT, **state}, stream)
            stream.flush()
            os.fsync(stream.fileno())
        saved = _named(made, step, kind)
        _tidy(folder, saved)
    except (OSError, RuntimeError) as error:  # torch's own writer wraps the system's errors
        reason = getattr(error, "strerror", None) or "the disk may be full"
        raise FileAccessError(f"{folder} cannot be written: {reason}; free space and go on with --resume") from error
    finally:
        with contextlib.suppress(OSError):
            made.unlink(missing_ok=True)
    return saved


def _named(made: Path, step: int, kind: Kind) -> Checkpoint:
    digest = file_sha256(made)
    path = made.with_name(f"{kind}-{step:08d}-{digest}{SUFFIX}")
    made.replace(path)
    return Checkpoint(step, kind, path, digest)


def _tidy(folder: Path, saved: Checkpoint) -> None:
    """What a killed process was writing goes, too: nobody else writes here."""
    for path in folder.glob(f".*{SUFFIX}"):
        path.unlink(missing_ok=True)
    others = [checkpoint for checkpoint in checkpoints(folder) if checkpoint != saved]
    older = [other for other in others if other.kind == saved.kind and other.step < saved.step]
    kept = older[1 - NUM_KEPT :] if saved.kind == "step" else []
    kept += [other for other in others if other.kind != saved.kind and other.step <= saved.step]
    for other in others:
        if other not in kept:
            other.path.unlink(missing_ok=True)


def load(checkpoint: Checkpoint) -> State:
    """What was saved, tensors on the CPU. Raises ModelFormatError for a damaged one, naming an older one that is not,
    or FileAccessError."""
    if not checkpoint.is_whole():
        raise ModelFormatError(
            f"{checkpoint.path} is damaged: its sha256 is not the one in its name; {_way(checkpoint)}"
        )
    try:
        state: State = torch.load(checkpoint.path, map_location="cpu", weights_only=True)
        is_ours = state["format"] == FORMAT
    except Exception as error:  # pickle and torch raise many kinds
        raise ModelFormatError(f"{checkpoint.path} is no checkpoint of a training; {_way(checkpoint)}") from error
    if not is_ours:
        raise ModelFormatError(f"{checkpoint.path} was saved by another version of edgespec; train anew (--force)")
    return state


def _way(checkpoint: Checkpoint) -> str:
    """How to go on without it."""
    found = checkpoints(checkpoint.path.parent)
    for older in reversed(found[: found.index(checkpoint)]):
        if older.is_whole():
            return f"delete it to go on from step {older.step}, {older.path.name}, which is whole"
    return "no older one is whole; delete its folder to train from the start"
