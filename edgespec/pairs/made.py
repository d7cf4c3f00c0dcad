"""A pair's folder around a draft model that was made in it."""

from __future__ import annotations

import collections.abc as abc
import contextlib
import os
import shutil
from pathlib import Path

from edgespec.errors import FileAccessError
from edgespec.pairs.pair import MANIFEST, Pair, render
from edgespec.pairs.sources import FileDraft, FileVerifier, Part, Progress, file_sha256

VERIFIER = "verifier"


def write_pair(
    folder: Path, verifier: Path, draft: str, *, description: str, profile: str = "", progress: Progress | None = None
) -> Path:
    """Make a pair of ``folder``, which holds the draft folder ``draft`` already; return the manifest's path.

    verifier  a GGUF; of a split one its first file. It stays where it is: the folder gets hard links to its files;
              symbolic ones where they lie on another disk, copies where there are neither
    profile   the device profile the pair is to run with; "" for none
    progress  called with (what is being read, 0..1)

    Older links, copies and an older manifest are replaced; the manifest comes last, whole or not at all. Raises
    FileAccessError, ModelNotFoundError, ModelFormatError, MissingDependencyError.
    """
    from quantize.draft import MANIFEST as DRAFT_MANIFEST
    from quantize.folder import new_file
    from quantize.gguf_shape import read_gguf
    from quantize.pair import pair_name

    info = read_gguf(verifier)
    first, *others = [_part(folder, path, name, progress) for name, path in _names(info.paths)]
    pair = Pair(
        name=pair_name(folder),
        description=description,
        license=info.license or "unknown",
        verifier=FileVerifier(first.path, first.size_bytes, first.sha256, tuple(others)),
        draft=FileDraft(draft, file_sha256(folder / draft / DRAFT_MANIFEST)),
        profile=profile,
    )
    with new_file(folder / MANIFEST, force=True) as path:
        path.write_text(render(pair), encoding="utf-8")
    return folder / MANIFEST


def _names(paths: abc.Sequence[Path]) -> list[tuple[str, Path]]:
    """What each file is called in the pair; the parts of a split one so that llama.cpp finds them from the first."""
    if len(paths) == 1:
        return [(f"{VERIFIER}.gguf", paths[0])]
    return [(f"{VERIFIER}-{i:05}-of-{len(paths):05}.gguf", path) for i, path in enumerate(paths, 1)]


def _part(folder: Path, source: Path, name: str, progress: Progress | None) -> Part:
    target = folder / name
    try:
        _place(source.resolve(), target)
    except OSError as error:
        raise FileAccessError(
            f"{target} cannot be made: {error.strerror or error}; free space or choose another folder"
        ) from error
    return Part(name, target.stat().st_size, file_sha256(target, progress))


def _place(source: Path, target: Path) -> None:
    """Make ``source`` appear as ``target``: with as few bytes as the file systems allow, and in one step."""
    if target.exists() and target.samefile(source):
        return
    made = target.with_name(f".{target.name}.{os.getpid()}")
    made.unlink(missing_ok=True)
    try:
        for way in (made.hardlink_to, made.symlink_to):
            with contextlib.suppress(OSError):
                way(source)
                break
        else:
            shutil.copyfile(source, made)
        made.replace(target)
    finally:
        made.unlink(missing_ok=True)
