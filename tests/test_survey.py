"""Sizes of what is to be placed, read at run time, against those of the offline toolkit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import onnxruntime
import pytest

from edgespec import survey
from edgespec.devices.memory import plan_memory
from edgespec.devices.profile import Draft, Profile
from edgespec.devices.sizes import Budget, ModelShape, Setup
from edgespec.drafters import onnx_providers
from edgespec.errors import MissingDependencyError
from edgespec.survey import draft_providers, look_at_box, verifier_shape
from quantize import build_draft
from quantize.gguf_shape import read_gguf
from quantize.source import open_source
from tests.devices.boxes import LAPTOP, gpu, workstation
from tests.gguf_tools import split_gguf
from tests.tiny import TinyConfig, write_gguf


@pytest.mark.parametrize(
    "config",
    [TinyConfig(), TinyConfig("qwen3", num_heads=8, num_kv_heads=8, key_length=64), TinyConfig(tied=True, q8_0=True)],
    ids=str,
)
def test_a_verifier_has_the_shape_the_toolkit_sees(config: TinyConfig, tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "whole.gguf", config)
    assert verifier_shape(whole) == replace(read_gguf(whole).shape, kind="")
    first, _ = split_gguf(whole, tmp_path)
    if config.architecture == "llama":  # the splitter of the tests writes no other
        assert verifier_shape(first) == replace(read_gguf(first).shape, kind="")


@pytest.mark.model
def test_the_starter_verifier_has_it_too(starter_gguf: Path) -> None:
    assert verifier_shape(starter_gguf) == replace(read_gguf(starter_gguf).shape, kind="")


def test_what_cannot_be_read_counts_by_its_size(tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(bytes(1000))
    assert verifier_shape(tmp_path / "bad.gguf") == ModelShape.of_file(1000)
    for path in (tmp_path / "none.gguf", tmp_path, Path("\0"), tmp_path / "x-00002-of-00003.gguf"):
        assert verifier_shape(path) == ModelShape.of_file(0)
    first, second = split_gguf(write_gguf(tmp_path / "whole.gguf"), tmp_path)
    second.unlink()
    assert verifier_shape(first) == ModelShape.of_file(first.stat().st_size)


@pytest.mark.parametrize("bits", [8, 32])
def test_a_draft_takes_nearly_what_the_toolkit_planned(bits: int, tmp_path: Path) -> None:
    from quantize.gguf_shape import draft_shape

    source = write_gguf(tmp_path / "tiny.gguf")
    folder = build_draft(source, tmp_path / "draft", bits=bits)
    ours, planned = survey.draft_shape(folder), draft_shape(open_source(source), bits, 32)
    assert ours.kv_bytes(100, "f32", "f32") == planned.kv_bytes(100, "f32", "f32")
    assert (ours.num_ctx, ours.num_vocab, ours.num_layers) == (planned.num_ctx, planned.num_vocab, planned.num_layers)
    assert planned.weights_bytes <= ours.weights_bytes <= planned.weights_bytes + 120_000  # the graph itself
    assert survey.draft_shape(folder / "model.onnx").num_layers == ours.num_layers


def test_a_published_export_counts_by_its_files(usual_folder: Path, tmp_path: Path) -> None:
    size = sum(file.stat().st_size for file in usual_folder.iterdir())
    assert survey.draft_shape(usual_folder) == ModelShape.of_file(size)
    (graph,) = usual_folder.glob("*.onnx")
    assert survey.draft_shape(graph) == ModelShape.of_file(graph.stat().st_size)
    (tmp_path / "a.onnx").write_bytes(bytes(10))
    (tmp_path / "a.onnx.data").write_bytes(bytes(90))
    (tmp_path / "b.onnx").write_bytes(bytes(1000))
    assert survey.draft_shape(tmp_path / "a.onnx") == ModelShape.of_file(100)
    assert survey.draft_shape(tmp_path / "none.onnx") == ModelShape.of_file(0)


def test_a_model_of_a_size_is_planned_with_its_weights() -> None:
    setup = Setup(ModelShape.of_file(1000, 4), ModelShape.of_file(500), Budget(2**40), 4096)
    lines = {line.what: line.bytes for line in plan_memory(setup).lines}
    assert (lines["verifier weights"], lines["draft weights"]) == (1000, 500)
    assert not any("KV" in what for what in lines)


def test_workers_are_devices_of_the_box() -> None:
    box = look_at_box(["box:50052", "other:1"])
    assert [gpu.name for gpu in box.gpus][-2:] == ["box:50052", "other:1"]
    assert look_at_box().gpus == box.gpus[:-2]


def test_providers_are_asked_for_only_where_they_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    auto, cuda = Profile("auto"), Profile("x", draft=Draft(provider="cuda"))
    assert draft_providers(auto, workstation(gpu(8))) == tuple(onnxruntime.get_available_providers())
    assert draft_providers(cuda, LAPTOP) == tuple(onnxruntime.get_available_providers())

    def fail() -> None:
        raise MissingDependencyError("ONNX Runtime does not load: gone; get it")

    monkeypatch.setattr(survey, "providers", fail)
    assert draft_providers(auto, LAPTOP) == ()
    assert draft_providers(cuda, LAPTOP) == ()


def test_without_onnx_runtime_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(MissingDependencyError, match="pip install onnxruntime"):
        onnx_providers.providers()
