"""Checkpoints: whole or not there, the newest kept, and a damaged one refused with a way out."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from edgespec.errors import FileAccessError, ModelFormatError
from quantize.distill.checkpoint import checkpoints, load, newest, save


def state(value: float) -> dict[str, object]:
    return {"weights": {"w": torch.full((3,), value)}, "points": [{"step": 1, "loss": None}], "text": "x"}


def steps(folder: Path) -> list[tuple[str, int]]:
    return [(found.kind, found.step) for found in checkpoints(folder)]


def test_what_was_saved_comes_back(tmp_path: Path) -> None:
    saved = save(tmp_path / "new" / "folder", 7, state(1.5))
    assert newest(tmp_path / "new" / "folder") == saved
    loaded = load(saved)
    assert torch.equal(loaded["weights"]["w"], torch.full((3,), 1.5))
    assert loaded["points"] == [{"step": 1, "loss": None}]
    assert os.listdir(saved.path.parent) == [saved.path.name]  # noqa: PTH208


def test_two_are_kept_and_the_one_before_the_decay(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step, state(step))
    save(tmp_path, 3, state(3), "stable")
    for step in (4, 5):
        save(tmp_path, step, state(step))
    assert steps(tmp_path) == [("stable", 3), ("step", 4), ("step", 5)]


def test_what_is_gone_back_behind_is_given_up(tmp_path: Path) -> None:
    for step in (5, 9):
        save(tmp_path, step, state(step))
    save(tmp_path, 7, state(7))
    assert steps(tmp_path) == [("step", 5), ("step", 7)]


def test_the_same_step_twice(tmp_path: Path) -> None:
    save(tmp_path, 4, state(1))
    again = save(tmp_path, 4, state(2))
    assert checkpoints(tmp_path) == [again]
    assert load(again)["weights"]["w"][0] == 2


def test_nothing_there(tmp_path: Path) -> None:
    assert newest(tmp_path / "none") is None
    assert newest(tmp_path) is None
    (tmp_path / "step-1.checkpoint").write_bytes(b"not ours")
    assert newest(tmp_path) is None


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty"])
def test_a_damaged_one_names_the_one_to_go_on_from(damage: str, tmp_path: Path) -> None:
    save(tmp_path, 1, state(1))
    last = save(tmp_path, 2, state(2))
    content = last.path.read_bytes()
    middle = len(content) // 2
    flipped = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
    last.path.write_bytes({"cut": content[:-1], "flipped": flipped, "empty": b""}[damage])
    with pytest.raises(
        ModelFormatError, match=r"step-00000002.* is damaged.*go on from step 1, step-00000001.*whole"
    ) as e:
        load(last)
    assert "\n" not in str(e.value)
    last.path.unlink()
    found = newest(tmp_path)
    assert found is not None
    assert float(load(found)["weights"]["w"][0]) == 1


def test_all_damaged(tmp_path: Path) -> None:
    for step in (1, 2):
        save(tmp_path, step, state(step)).path.write_bytes(b"")
    found = newest(tmp_path)
    assert found is not None
    with pytest.raises(ModelFormatError, match="no older one is whole; delete its folder"):
        load(found)


def test_a_file_of_something_else(tmp_path: Path) -> None:
    import hashlib

    content = b"PK no torch file"
    path = tmp_path / f"step-00000001-{hashlib.sha256(content).hexdigest()}.checkpoint"
    path.write_bytes(content)
    found = newest(tmp_path)
    assert found is not None
    with pytest.raises(ModelFormatError, match="is no checkpoint of a training"):
        load(found)


def test_code_in_a_checkpoint_is_not_run(tmp_path: Path) -> None:
    import hashlib
    import pickle

    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.mkdir, (str(tmp_path / "ran"),)

    path = tmp_path / "evil"
    torch.save({"format": 1, "evil": Evil()}, path, pickle_module=pickle)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    path.rename(tmp_path / f"step-00000001-{digest}.checkpoint")
    found = newest(tmp_path)
    assert found is not None
    with pytest.raises(ModelFormatError):
        load(found)
    assert not (tmp_path / "ran").exists()


def test_what_a_killed_process_was_writing_goes(tmp_path: Path) -> None:
    (tmp_path / ".0123456789abcdef.checkpoint").write_bytes(b"half")
    saved = save(tmp_path, 1, state(1))
    assert list(tmp_path.iterdir()) == [saved.path]


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FileAccessError, match="cannot be written"):
        save(tmp_path / "file", 1, state(1))


@pytest.mark.skipif(os.name != "posix", reason="limits of POSIX")
def test_a_full_disk_leaves_the_old_one(tmp_path: Path) -> None:
    import resource
    import signal

    old = save(tmp_path, 1, state(1))
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(FileAccessError, match="free space"):
            save(tmp_path, 2, {"weights": torch.zeros(1 << 20)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert list(tmp_path.iterdir()) == [old.path]
    assert old.is_whole()
