"""The file that keeps a calibration: nothing in it can do harm."""

from __future__ import annotations

import collections.abc as abc
import json
import math
import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edgespec.calibration import Calibration, Key, load, store
from edgespec.core.costs import Curves, Overlap
from edgespec.core.track import Received
from edgespec.devices.threads import Threads

KEY = Key("v 1", "d 2", ("CPU: A CPU",), 2, "build", "onnxruntime 1", "none 0", "num_slots=1", None)
CURVES = Curves(
    (1, 2, 8), (64, 512), ((0.01, 0.02, 0.03), (0.02, 0.03, 0.05)), (1, 2), (0.005, 0.006), Overlap(1.2, 1.1)
)
FOUND = Calibration(
    CURVES, Threads(1, 1, spin=False, together=True), "overlapped", "it pays", 2.5, 0.01, "2026-11-30T12:00:00+00:00",
    43.0, False, (Received(1, 2, (3.0, 0.5)),),
)  # fmt: skip


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EDGESPEC_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.parametrize(
    "found",
    [
        FOUND,
        replace(FOUND, curves=Curves((1,), (0,), ((0.5,),)), threads=Threads(4, 4), mode="plain", is_quick=True),
        replace(FOUND, curves=replace(CURVES, overlap=None, read_s=0.001), reason="π ≥ 3"),
        replace(FOUND, received=(Received(2, 3, (4.0, 1.5, 0.2, 3.0)), Received(4, 4), Received(0, 1, (0.1,)))),
    ],
)
def test_what_is_stored_is_loaded(found: Calibration) -> None:
    assert load(KEY) is None
    path = store(KEY, found)
    assert path == KEY.path
    assert path is not None
    assert path.parent.name == "calibration"
    assert load(KEY) == found
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_a_later_one_replaces_an_earlier_one() -> None:
    store(KEY, replace(FOUND, is_quick=True))
    store(KEY, FOUND)
    assert load(KEY) == FOUND


def test_what_was_never_measured_is_not_worth_a_word(caplog: pytest.LogCaptureFixture) -> None:
    assert load(KEY) is None
    assert caplog.messages == []


def ignored(caplog: pytest.LogCaptureFixture) -> str:
    """The one line that is logged."""
    assert load(KEY) is None
    (message,) = caplog.messages
    assert str(KEY.path) in message
    assert "measured anew" in message
    assert "\n" not in message
    return message


def plant(content: bytes) -> None:
    KEY.path.parent.mkdir(parents=True)
    KEY.path.write_bytes(content)


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"null", b"[]", b"3", b'"text"', b"{}", b"\xff\xfe\x00", b"[" * 100_000, b'{"format": 2}', b"NaN",
     b'{"format": 2, "key": null, "calibration": null}', bytes(2**21)],
)  # fmt: skip
def test_a_corrupt_file_is_ignored(content: bytes, caplog: pytest.LogCaptureFixture) -> None:
    plant(content)
    ignored(caplog)


def test_a_file_cut_short_anywhere_is_ignored(caplog: pytest.LogCaptureFixture) -> None:
    store(KEY, FOUND)
    whole = KEY.path.read_bytes()
    for length in range(0, len(whole) - 1, 23):
        KEY.path.write_bytes(whole[:length])
        caplog.clear()
        ignored(caplog)


def test_another_format_is_ignored(caplog: pytest.LogCaptureFixture) -> None:
    store(KEY, FOUND)
    KEY.path.write_text(json.dumps(json.loads(KEY.path.read_text()) | {"format": 3}))
    assert "format" in ignored(caplog)


def test_a_file_from_other_hardware_is_ignored(caplog: pytest.LogCaptureFixture) -> None:
    other = replace(KEY, devices=("CUDA0: NVIDIA GeForce RTX 3060",), num_cpus=16)
    stored = store(other, FOUND)
    assert stored is not None
    stored.rename(KEY.path)
    assert "other hardware" in ignored(caplog)


def changed(path: abc.Sequence[str | int], value: Any) -> bytes:
    content = {"format": 2, "key": KEY.as_dict(), "calibration": json.loads(json.dumps(FOUND.as_dict()))}
    place: Any = content["calibration"]
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    return json.dumps(content).encode()


WRONG: tuple[Any, ...] = (None, "text", -1, 0, math.nan, math.inf, [], {}, [[1]], True, 1e300, 10**400)
PLACES: list[tuple[str | int, ...]] = [
    ("curves",), ("curves", "widths"), ("curves", "widths", 0), ("curves", "depths"), ("curves", "verify_s"),
    ("curves", "verify_s", 0), ("curves", "verify_s", 1, 2), ("curves", "batches"), ("curves", "step_s"),
    ("curves", "step_s", 0), ("curves", "overlap", "verify"), ("threads",), ("threads", "verifier"),
    ("threads", "spin"), ("mode",), ("gain",), ("plain_s",), ("budget_s",), ("is_quick",), ("reason",),
    ("measured_at",), ("unknown",), ("curves", "unknown"), ("threads", "unknown"),
    ("received",), ("received", 0), ("received", 0, 0), ("received", 0, 1), ("received", 0, 2), ("received", 0, 2, 0),
]  # fmt: skip


@pytest.mark.parametrize("path", PLACES, ids=str)
def test_wrong_values_anywhere_are_ignored(path: tuple[str | int, ...], caplog: pytest.LogCaptureFixture) -> None:
    KEY.path.parent.mkdir(parents=True)
    num_ignored = 0
    for value in WRONG:
        caplog.clear()
        KEY.path.write_bytes(changed(path, value))
        found = load(KEY)
        if found is None:
            num_ignored += 1
            assert len(caplog.messages) == 1
        else:  # a value that happens to be of the right kind
            assert found.curves.verify_s[0][0] > 0
            assert found.threads.verifier > 0
    assert num_ignored >= len(WRONG) - 3


def test_missing_values_are_ignored(caplog: pytest.LogCaptureFixture) -> None:
    whole = FOUND.as_dict()
    KEY.path.parent.mkdir(parents=True)
    for name in whole:
        content = {key: value for key, value in whole.items() if key != name}
        KEY.path.write_text(json.dumps({"format": 2, "key": KEY.as_dict(), "calibration": content}))
        caplog.clear()
        ignored(caplog)


def test_a_folder_in_its_place_is_ignored(caplog: pytest.LogCaptureFixture) -> None:
    KEY.path.mkdir(parents=True)
    ignored(caplog)
    assert store(KEY, FOUND) is None
    assert [path.name for path in KEY.path.parent.iterdir()] == [KEY.path.name]


def test_a_cache_that_cannot_be_written_is_no_error(own_cache: Path) -> None:
    own_cache.write_text("a file where the folder should be")
    assert store(KEY, FOUND) is None


def test_a_full_disk_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    store(KEY, FOUND)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(json, "dump", full)
    assert store(KEY, replace(FOUND, reason="new")) is None
    assert load(KEY) == FOUND
    assert [path.name for path in KEY.path.parent.iterdir()] == [KEY.path.name]


def test_a_file_that_may_not_be_read_is_ignored(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store(KEY, FOUND)

    def denied(*_: object) -> None:  # root, whom tests often run as, may read everything
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", denied)
    assert "Permission denied" in ignored(caplog)


def test_writers_at_the_same_time_leave_one_whole_file(caplog: pytest.LogCaptureFixture) -> None:
    stop = threading.Event()
    store(KEY, FOUND)

    def write(number: int) -> None:
        while not stop.is_set():
            store(KEY, replace(FOUND, plain_s=number + 0.5))

    writers = [threading.Thread(target=write, args=(number,)) for number in range(3)]
    for writer in writers:
        writer.start()
    found = [load(KEY) for _ in range(300)]
    stop.set()
    for writer in writers:
        writer.join()
    assert None not in found
    assert caplog.messages == []
    assert os.listdir(KEY.path.parent) == [KEY.path.name]  # noqa: PTH208
