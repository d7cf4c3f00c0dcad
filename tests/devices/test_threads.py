"""How the usable CPUs are shared, and that no more threads than that really work."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from edgespec.devices.threads import Threads, busy_cpus, pin, places, split, splits
from quantize import build_draft
from tests.devices.trees import CONTAINER_V1, CONTAINER_V2, plant
from tests.tiny import TinyConfig, write_gguf

ROOT = Path(__file__).parents[2]
CPUS = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
needs_affinity = pytest.mark.skipif(not CPUS, reason="this system has no affinity masks")
needs_two = pytest.mark.skipif(len(CPUS) < 2, reason="needs two usable CPUs")


# The split


def test_whoever_takes_turns_may_have_all() -> None:
    assert split(8) == Threads(8, 8, spin=True, together=False)
    assert split(8, verifier_on_gpu=True) == Threads(8, 8)
    assert split(8, asked_verifier=3, asked_draft=20) == Threads(3, 8)


def test_both_at_once_share() -> None:
    assert split(8, together=True) == Threads(6, 2, spin=False, together=True)
    assert split(2, together=True) == Threads(1, 1, spin=False, together=True)
    assert split(3, together=True) == Threads(2, 1, spin=False, together=True)


def test_a_side_on_the_gpu_needs_one_thread_and_leaves_the_rest_to_the_other() -> None:
    assert split(8, verifier_on_gpu=True, together=True) == Threads(1, 7, spin=True, together=True)
    assert split(8, draft_on_gpu=True, together=True) == Threads(7, 1, spin=True, together=True)
    assert split(8, verifier_on_gpu=True, draft_on_gpu=True, together=True) == Threads(1, 1, spin=True, together=True)
    assert split(2, verifier_on_gpu=True, together=True) == Threads(1, 1, spin=True, together=True)


def test_one_cpu_cannot_work_for_both_at_once() -> None:
    for on_gpu in (False, True):
        assert split(1, verifier_on_gpu=on_gpu, together=True) == Threads(1, 1, spin=True, together=False)
        assert splits(1, verifier_on_gpu=on_gpu) == ()


@pytest.mark.parametrize(
    ("asked_verifier", "asked_draft", "expected"),
    [(4, 4, (4, 4)), (3, None, (3, 5)), (None, 5, (3, 5)), (2, 2, (2, 2)), (8, None, (6, 2)), (None, 8, (6, 2)),
     (8, 8, (6, 2)), (7, 3, (6, 2)), (8, 1, (6, 1)), (1, 8, (1, 2)), (100, 100, (6, 2))],
)  # fmt: skip
def test_wishes_count_as_far_as_they_fit(
    asked_verifier: int | None, asked_draft: int | None, expected: tuple[int, int]
) -> None:
    found = split(8, together=True, asked_verifier=asked_verifier, asked_draft=asked_draft)
    assert (found.verifier, found.draft) == expected


def test_the_sum_is_never_more_than_the_usable_cpus_and_nobody_has_none() -> None:
    asked = (None, 1, 2, 3, 5, 8, 64)
    flags = (False, True)
    for num_cpus, verifier, draft, on_gpu, draft_on_gpu in itertools.product(range(1, 18), asked, asked, flags, flags):
        sides: dict[str, Any] = {"verifier_on_gpu": on_gpu, "draft_on_gpu": draft_on_gpu}
        wishes: dict[str, Any] = {"asked_verifier": verifier, "asked_draft": draft}
        for found in (split(num_cpus, together=True, **sides, **wishes), *splits(num_cpus, **sides, **wishes)):
            assert min(found.verifier, found.draft) >= 1
            assert found.together == (num_cpus > 1)
            assert found.verifier + found.draft <= max(2, num_cpus)
            assert found.spin == (not found.together or on_gpu or draft_on_gpu)


def test_some_splits_are_worth_a_try() -> None:
    assert [(found.verifier, found.draft) for found in splits(16)] == [(15, 1), (12, 4), (8, 8)]
    assert [(found.verifier, found.draft) for found in splits(2)] == [(1, 1)]
    assert [(found.verifier, found.draft) for found in splits(16, verifier_on_gpu=True)] == [(1, 15)]
    assert [(found.verifier, found.draft) for found in splits(16, asked_draft=5)] == [(11, 5)]
    assert len(splits(16, asked_verifier=16, asked_draft=16)) == 3


# Pinning


@needs_affinity
def test_places_are_apart_and_pinned_threads_stay_there() -> None:
    if len(CPUS) < 2:
        assert places(Threads(1, 1, together=True)) is None
        return
    found = places(Threads(len(CPUS) - 1, 1, together=True))
    assert found is not None
    verifier, draft = found
    assert (len(verifier), len(draft)) == (len(CPUS) - 1, 1)
    assert verifier | draft == {*CPUS}
    seen: list[set[int]] = []

    def work() -> None:
        assert pin(draft)
        child = threading.Thread(target=lambda: seen.append(os.sched_getaffinity(0)))
        child.start()
        child.join()

    pinned = threading.Thread(target=work)
    pinned.start()
    pinned.join()
    assert seen == [{*draft}]
    assert sorted(os.sched_getaffinity(0)) == CPUS


@needs_affinity
def test_there_are_no_places_for_sides_that_take_turns_or_where_cpus_and_threads_differ() -> None:
    assert places(Threads(len(CPUS), len(CPUS))) is None
    assert places(Threads(len(CPUS) + 3, 1, together=True)) is None


def test_what_cannot_be_pinned_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not pin({2**20})
    assert not pin(set())
    for name in ("sched_setaffinity", "sched_getaffinity"):
        monkeypatch.delattr(os, name, raising=False)
    assert not pin({0})
    assert places(Threads(1, 1, together=True)) is None


def test_a_box_is_between_idle_and_busy() -> None:
    assert 0.0 <= busy_cpus(0.02) <= (os.cpu_count() or 1) + 0.01


# What really works


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Large enough that all threads get work."""
    folder = tmp_path_factory.mktemp("threads")
    config = TinyConfig(width=256, num_layers=4, num_heads=8, num_kv_heads=4, num_hidden=768)
    gguf = write_gguf(folder / "model.gguf", config)
    return gguf, build_draft(gguf, folder / "draft", bits=8)


def hot(models: tuple[Path, Path], how: str, cpus: list[int], root: Path = Path("/")) -> dict[str, Any]:
    """What threads_child says, within an affinity mask."""
    command = [sys.executable, "-m", "tests.devices.threads_child", *map(str, models), str(root), how]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=120,
        preexec_fn=lambda: os.sched_setaffinity(0, cpus),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    content: dict[str, Any] = json.loads(done.stdout)
    return content


@needs_affinity
@needs_two
def test_in_a_mask_of_two_cpus_two_threads_work_for_both_sides_together(models: tuple[Path, Path]) -> None:
    found = hot(models, "together", CPUS[:2])
    assert (found["verifier"], found["draft"], found["spin"], found["together"]) == (1, 1, False, True)
    assert found["hot"] == {"verifier": 1, "draft": 1, "both": 2}


@needs_affinity
@needs_two
def test_in_a_mask_of_two_cpus_sides_that_take_turns_have_two_threads_each(models: tuple[Path, Path]) -> None:
    found = hot(models, "turns", CPUS[:2])
    assert (found["verifier"], found["draft"], found["together"]) == (2, 2, False)
    assert found["hot"] == {"verifier": 2, "draft": 2}


@needs_affinity
def test_in_a_mask_of_one_cpu_one_thread_works_and_nobody_works_at_the_same_time(models: tuple[Path, Path]) -> None:
    found = hot(models, "together", CPUS[:1])
    assert (found["verifier"], found["draft"], found["together"]) == (1, 1, False)
    assert found["hot"] == {"verifier": 1, "draft": 1}


@needs_affinity
@pytest.mark.parametrize(("files", "how"), [(CONTAINER_V1, "together"), (CONTAINER_V2, "turns")])
def test_a_quota_of_one_cpu_is_kept_too(
    models: tuple[Path, Path], tmp_path: Path, files: dict[str, str], how: str
) -> None:
    root = plant(tmp_path, {name: text.replace("200000", "100000") for name, text in files.items()})
    found = hot(models, how, CPUS, root)
    assert (found["verifier"], found["draft"], found["together"]) == (1, 1, False)
    assert found["hot"] == {"verifier": 1, "draft": 1}
