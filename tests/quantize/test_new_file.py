"""A file that appears whole or not at all, whatever happens while it is written."""

from __future__ import annotations

import collections.abc as abc
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from edgespec.errors import FileAccessError
from quantize.folder import new_file, new_folder

posix = pytest.mark.skipif(os.name != "posix", reason="needs POSIX signals and limits")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def write(out: Path, content: bytes = b"new", *, force: bool = False, sources: tuple[Path, ...] = ()) -> None:
    with new_file(out, force=force, sources=sources) as made:
        assert made.parent == out.parent
        made.write_bytes(content)


def child(out: Path, body: str, before: str = "") -> subprocess.Popen[str]:
    """A process that writes ``out``; ``body`` runs with half of it on disk."""
    code = f"""
import os, resource, signal, sys, time
from pathlib import Path
from quantize.folder import new_file
{before}
try:
    with new_file(Path(sys.argv[1]), force=True) as made:
        made.write_bytes(bytes(50_000))
        {body}
        made.write_bytes(bytes(100_000))
except Exception as error:
    print(type(error).__name__, error)
"""
    return subprocess.Popen(
        [sys.executable, "-c", code, str(out)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_the_file_appears_when_the_block_ends(tmp_path: Path) -> None:
    out = tmp_path / "new" / "folders" / "out.bin"
    with new_file(out, force=False) as made:
        made.write_bytes(b"half")
        assert not out.exists()
    assert out.read_bytes() == b"half"
    assert names(out.parent) == ["out.bin"]


@posix
def test_its_permissions_are_those_of_any_new_file(tmp_path: Path) -> None:
    write(tmp_path / "out")
    (tmp_path / "plain").write_bytes(b"")
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == stat.S_IMODE((tmp_path / "plain").stat().st_mode)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_nothing_is_left_when_the_block_fails(error: type[BaseException], tmp_path: Path) -> None:
    def fail() -> None:
        with new_file(tmp_path / "out", force=True) as made:
            made.write_bytes(b"half")
            raise error

    (tmp_path / "out").write_bytes(b"old")
    with pytest.raises(error):
        fail()
    assert names(tmp_path) == ["out"]
    assert (tmp_path / "out").read_bytes() == b"old"


def test_an_existing_file_is_kept_unless_forced(tmp_path: Path) -> None:
    out = tmp_path / "out"
    write(out, b"old")
    with pytest.raises(FileAccessError, match=r"exists; choose another file, or replace it with force"):
        write(out)
    assert out.read_bytes() == b"old"
    write(out, force=True)
    assert out.read_bytes() == b"new"
    assert names(tmp_path) == ["out"]


def test_what_another_process_made_meanwhile_is_kept(tmp_path: Path) -> None:
    with pytest.raises(FileAccessError, match="exists"), new_file(tmp_path / "out", force=False):
        (tmp_path / "out").write_bytes(b"theirs")
    assert (tmp_path / "out").read_bytes() == b"theirs"
    assert names(tmp_path) == ["out"]


def test_a_folder_is_never_replaced_by_a_file(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "cat.jpg").write_bytes(b"cat")
    with pytest.raises(FileAccessError, match=r"is not a regular file, so it is not replaced"):
        write(tmp_path / "out", force=True)
    assert names(tmp_path / "out") == ["cat.jpg"]


@posix
def test_a_device_is_never_replaced_by_a_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(FileAccessError, match="is not a regular file"):
        write(tmp_path / "pipe", force=True)
    assert (tmp_path / "pipe").is_fifo()


@posix
def test_of_a_link_the_link_is_replaced_not_what_it_leads_to(tmp_path: Path) -> None:
    (tmp_path / "precious").write_bytes(b"precious")
    (tmp_path / "out").symlink_to(tmp_path / "precious")
    (tmp_path / "broken").symlink_to(tmp_path / "nowhere")
    for name in ("out", "broken"):
        with pytest.raises(FileAccessError, match="exists"):
            write(tmp_path / name)
        write(tmp_path / name, force=True)
        assert (tmp_path / name).read_bytes() == b"new"
    assert (tmp_path / "precious").read_bytes() == b"precious"


@pytest.mark.parametrize("kind", ["itself", "dotted", "symbolic", "hard"])
def test_a_source_is_never_written(kind: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"source")
    out = {"itself": source, "dotted": tmp_path / "." / ".." / tmp_path.name / "source"}.get(kind, tmp_path / "other")
    if kind == "symbolic":
        out.symlink_to(source)
    if kind == "hard":
        os.link(source, out)
    with pytest.raises(FileAccessError, match=r"is or holds the source .*, which is never written"):
        write(out, force=True, sources=(source,))
    assert source.read_bytes() == b"source"


def test_a_folder_that_holds_a_source_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    for name in ("marker", "source"):
        (tmp_path / "out" / name).write_bytes(b"")
    source = tmp_path / "out" / "source"
    with (
        pytest.raises(FileAccessError, match="holds the source"),
        new_folder(tmp_path / "out", "marker", force=True, sources=[source]),
    ):
        pass
    assert names(tmp_path / "out") == ["marker", "source"]


def test_a_parent_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(FileAccessError, match="cannot be written"):
        write(tmp_path / "file" / "out")


def test_no_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, *_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(FileAccessError, match=r"out cannot be written: Permission denied"):
        write(tmp_path / "out")
    assert names(tmp_path) == []


@posix
def test_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "out").write_bytes(b"old")
    limit = "resource.setrlimit(resource.RLIMIT_FSIZE, (70_000, 70_000))"
    output, _ = child(tmp_path / "out", "pass", before=limit).communicate(timeout=60)
    assert output.startswith("FileAccessError"), output
    assert "cannot be written: File too large" in output
    assert names(tmp_path) == ["out"]
    assert (tmp_path / "out").read_bytes() == b"old"


@posix
def test_a_killed_process_leaves_no_file_and_the_next_one_cleans_up(tmp_path: Path) -> None:
    process = child(tmp_path / "out", "os.kill(os.getpid(), signal.SIGKILL)")
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    assert not (tmp_path / "out").exists()
    assert len(names(tmp_path)) == 1
    write(tmp_path / "out")
    assert names(tmp_path) == ["out"]


@posix
def test_ctrl_c_leaves_nothing(tmp_path: Path) -> None:
    process = child(tmp_path / "out", "print('half', flush=True); time.sleep(60)")
    assert process.stdout is not None
    assert process.stdout.readline() == "half\n"
    assert len(names(tmp_path)) == 1
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode != 0
    assert names(tmp_path) == []


def test_what_a_living_process_is_writing_is_left_alone(tmp_path: Path) -> None:
    with new_file(tmp_path / "out", force=True) as made:
        write(tmp_path / "out", b"theirs")
        assert made.exists()
        made.write_bytes(b"ours")
    assert (tmp_path / "out").read_bytes() == b"ours"
    assert names(tmp_path) == ["out"]


def test_folders_within_a_new_folder(tmp_path: Path) -> None:
    with new_folder(tmp_path / "out", "marker", force=False) as made:
        (made / "inner").mkdir()
        (made / "inner" / "file").write_bytes(b"file")
        (made / "marker").write_bytes(b"")
    assert (tmp_path / "out" / "inner" / "file").read_bytes() == b"file"


@pytest.mark.parametrize("maker", [lambda out, **rest: new_folder(out, "x", **rest), new_file], ids=["folder", "file"])
def test_nothing_is_made_inside_a_source(maker: abc.Callable[..., Any], tmp_path: Path) -> None:
    source = tmp_path / "checkpoint"
    source.mkdir()
    made = maker(source / "below" / "out", force=True, sources=[source])
    with pytest.raises(FileAccessError, match=r"is inside the source .*, which is never written"), made:
        pass
    assert list(source.iterdir()) == []
