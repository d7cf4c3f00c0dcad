"""What makes a calibration another one."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from edgespec.calibration import Key, key_of
from edgespec.calibration import key as module
from edgespec.devices.profile import Profile, Speculation
from edgespec.verifiers.llama_options import LlamaOptions


@dataclass(frozen=True)
class Device:
    name: str = "CPU"
    description: str = "A CPU"
    kind: str = "cpu"
    free_bytes: int = 0
    memory_bytes: int = 0


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    return write(tmp_path / "model.gguf", b"GGUF" + bytes(3 * 2**20))


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    folder = tmp_path / "draft"
    folder.mkdir()
    write(folder / "draft.toml", b"format = 1")
    write(folder / "model.onnx", bytes(1000))
    return folder


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def make(gguf: Path, draft: str | Path = "lookup", **changes: Any) -> Key:
    options = LlamaOptions(gguf, num_threads=changes.pop("num_threads", 1))
    profile = changes.pop("profile", Profile("mine"))
    devices = changes.pop("devices", (Device(),))
    return key_of(replace(options, **changes), draft, profile, devices, changes.get("asked"))


def test_the_same_again_is_the_same(gguf: Path, draft: Path) -> None:
    assert make(gguf, draft) == make(gguf, draft)
    assert make(gguf, draft).path == make(gguf, draft).path
    assert make(gguf, draft, num_threads=7) == make(gguf, draft)  # a calibration chooses threads itself


def test_a_context_too_short_to_measure_everything_is_another(gguf: Path) -> None:
    """Else a run in a context of 4 tokens would decide for all that come after it."""
    assert make(gguf, num_ctx=4) != make(gguf, num_ctx=5) != make(gguf)
    assert make(gguf, num_ctx=4096) == make(gguf, num_ctx=8192) == make(gguf)


def test_a_moved_or_copied_model_is_the_same(gguf: Path, draft: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(draft, elsewhere / "other-name")
    shutil.copy(gguf, elsewhere)
    assert make(elsewhere / "model.gguf", elsewhere / "other-name") == make(gguf, draft)


@pytest.mark.parametrize("offset", [0, 100, 3 * 2**20])
def test_a_changed_verifier_is_another(gguf: Path, offset: int) -> None:
    before = make(gguf)
    with gguf.open("r+b") as file:
        file.seek(offset)
        file.write(b"x")
    assert make(gguf).verifier != before.verifier
    assert make(gguf).path != before.path


def test_a_longer_verifier_is_another(gguf: Path) -> None:
    before = make(gguf)
    write(gguf, gguf.read_bytes() + bytes(1))
    assert make(gguf) != before


def test_only_the_ends_of_a_large_file_are_read(tmp_path: Path) -> None:
    huge = tmp_path / "huge.gguf"
    with huge.open("wb") as file:
        file.truncate(2**40)  # sparse
    assert make(huge).verifier.endswith(f" {2**40}")


@pytest.mark.parametrize("name", ["model.onnx", "draft.toml"])
def test_a_changed_draft_is_another(gguf: Path, draft: Path, name: str) -> None:
    before = make(gguf, draft)
    write(draft / name, b"changed")
    assert make(gguf, draft).draft != before.draft


def test_an_onnx_file_brings_its_weights_along(gguf: Path, tmp_path: Path) -> None:
    model = write(tmp_path / "decoder[1].onnx", b"graph")
    weights = write(tmp_path / "decoder[1].onnx.data", b"weights")
    before = make(gguf, model)
    write(weights, b"WEIGHTS")
    changed = make(gguf, model)
    assert changed != before
    write(tmp_path / "unrelated.txt", b"text")
    assert make(gguf, model) == changed


def test_a_split_verifier_is_all_of_its_parts(tmp_path: Path) -> None:
    parts = [write(tmp_path / f"big[x]-0000{i}-of-00002.gguf", b"GGUF") for i in (1, 2)]
    before = make(parts[0])
    write(parts[1], b"GGUFx")
    assert make(parts[0]) != before


def test_drafts_without_files_have_names(gguf: Path, draft: Path) -> None:
    keys = [make(gguf, "lookup"), make(gguf, "none"), make(gguf, draft)]
    assert [key.draft for key in keys[:2]] == ["lookup", "none"]
    assert len({key.path for key in keys}) == 3


@pytest.mark.parametrize(
    "change",
    [
        {"devices": (Device(), Device("CUDA0", "NVIDIA GeForce RTX 3060", "gpu"))},
        {"devices": (Device(description="Another CPU"),)},
        {"profile": Profile("yours")},
        {"profile": Profile("mine", speculation=Speculation(num_candidates=3))},
        {"num_slots": 4},
        {"num_gpu_layers": 0},
        {"kv_type_k": "q8_0"},
        {"kv_type_v": "bf16"},
        {"flash_attention": True},
        {"tensor_split": (1.0, 2.0)},
    ],
)
def test_other_hardware_and_settings_are_another(gguf: Path, change: dict[str, Any]) -> None:
    assert make(gguf, **change).path != make(gguf).path


def test_another_build_runtime_number_of_cpus_or_wish_is_another(gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = make(gguf)
    assert key_of(LlamaOptions(gguf, 1), "lookup", Profile("mine"), (Device(),), 3) != before
    for name, value in (("build_identity", "new"), ("usable_cpus", 64), ("_runtime", "onnxruntime 9")):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, lambda value=value: value)
            assert make(gguf).path != before.path


def test_free_memory_does_not_matter(gguf: Path) -> None:
    assert make(gguf, devices=(Device(free_bytes=5),)) == make(gguf)


def test_the_runtimes_version_is_there(gguf: Path) -> None:
    assert make(gguf).runtime.startswith("onnxruntime")


def test_a_file_that_is_not_there_is_left_to_the_loader(tmp_path: Path) -> None:
    assert make(tmp_path / "missing.gguf", tmp_path / "missing").verifier.endswith(" 0")


def test_a_key_is_json(gguf: Path, draft: Path) -> None:
    key = make(gguf, draft, tensor_split=(1.0, 0.5))
    assert json.loads(json.dumps(key.as_dict())) == key.as_dict()
