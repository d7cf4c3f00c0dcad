"""What a distillation makes in its folder, and whose that folder is."""

from __future__ import annotations

import collections.abc as abc
import re
import shutil
from pathlib import Path

from edgespec.errors import FileAccessError
from quantize.distill.settings import SETTINGS, WORK, DistillSettings, has_settings, is_ours

CORPUS, TRAINING, HEAD, SPENT = "corpus", "training", "head.npy", "spent.json"
HEAD_DIGEST = "head.sha256"
# All that --force removes; what is begun has such a name with a dot before and more behind.
_OURS = ("draft-int8", "draft-int4", "report.md", "report.json", "loss.png", "acceptance.png", "pair.toml")
_OURS_IN_WORK = (CORPUS, TRAINING, HEAD, HEAD_DIGEST, SPENT, SETTINGS)
_VERIFIER = re.compile(r"verifier(-\d{5}-of-\d{5})?\.gguf")  # a pair's links to it


def check_out(settings: DistillSettings) -> None:
    """An ``out`` that is there is gone on with or replaced on demand only, and never one that is not ours."""
    out = settings.out
    for given in filter(None, (settings.verifier, settings.prompts)):
        if out.resolve() in (given.resolve(), *given.resolve().parents) and settings.force:
            raise FileAccessError(f"{out} holds {given}, which is never removed; choose another folder")
    if _is_nothing(out):
        return
    if not has_settings(out):
        raise FileAccessError(f"{out} exists and is not of a distillation, so it is left alone; choose another folder")
    if settings.force:
        _check_foreign(out)
    elif not settings.resume:
        raise FileAccessError(f"{out} exists; go on with it (--resume), replace it (--force), or choose another folder")


def _is_nothing(out: Path) -> bool:
    """Whether there is no file yet; what a process killed at once leaves is an empty folder, or a file half made."""
    if not out.is_dir():
        return not out.exists()
    return all(path.is_dir() or path.name.startswith(f".{SETTINGS}.") for path in out.rglob("*"))


def _check_foreign(out: Path) -> None:
    """Other programs have a file of that name, too: what it says, or that all else is ours, shows whose this is."""
    foreign = [path for path in (*out.iterdir(), *(out / WORK).iterdir()) if path not in {out / WORK, *_made(out)}]
    if foreign and not is_ours(out):
        raise FileAccessError(
            f"{out} holds {foreign[0].name} and no readable {WORK}/{SETTINGS} of a distillation, so it is left alone; "
            "move that file, or choose another folder"
        )


def _made(out: Path) -> list[Path]:
    """All that a distillation makes in it, the settings last."""
    at_work = [path for path in (out / WORK).iterdir() if _is_named(path, _OURS_IN_WORK)]
    found = [path for path in out.iterdir() if _is_named(path, _OURS) or _VERIFIER.fullmatch(path.name)]
    return [*found, *sorted(at_work, key=lambda path: path.name == SETTINGS)]


def _is_named(path: Path, names: abc.Collection[str]) -> bool:
    return path.name in names or any(path.name.startswith(f".{name}.") for name in names)


def remove(out: Path) -> None:
    """What a distillation made in it, and nothing else. A folder that is half removed is still known as ours."""
    try:
        for path in _made(out):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
    except OSError as error:
        raise FileAccessError(f"{out} cannot be removed: {error.strerror or error}; check its permissions") from error
