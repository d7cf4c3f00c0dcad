"""What there is to place: the box with llama.cpp's devices, and the sizes of both models. Loads no weights."""

from __future__ import annotations

import collections.abc as abc
import contextlib
from dataclasses import dataclass
from pathlib import Path

from edgespec.devices.gguf_sizes import Facts, gguf_shape, parts
from edgespec.devices.probe import Box, probe
from edgespec.devices.profile import Profile
from edgespec.devices.sizes import ModelShape
from edgespec.drafters.onnx_manifest import MANIFEST, DraftManifest
from edgespec.drafters.onnx_providers import providers
from edgespec.errors import EdgespecError, MissingDependencyError
from edgespec.verifiers.llama_devices import list_devices
from edgespec.verifiers.llama_gguf import read_header


@dataclass(frozen=True, slots=True)
class Worker:
    """An RPC worker's devices, as the box's own: a process that asked how large they are would depend on them."""

    name: str
    description: str = "RPC worker"
    kind: str = "gpu"
    free_bytes: int = 0
    memory_bytes: int = 0


def look_at_box(workers: abc.Iterable[str] = ()) -> Box:
    """What this process may use now, GPUs and workers included. Raises MissingDependencyError without llama.cpp."""
    return probe(devices=[*list_devices(), *map(Worker, workers)])


def draft_providers(profile: Profile, box: Box) -> tuple[str, ...]:
    """What ONNX Runtime lists, where it matters: elsewhere, and where it does not load, nothing is asked for."""
    if profile.draft.provider == "cpu" and not (box.num_nvidia_cards or box.gpus):
        return ()
    with contextlib.suppress(MissingDependencyError):
        return providers()
    return ()


def verifier_shape(path: Path) -> ModelShape:
    """By a GGUF's header. What llama.cpp cannot read, or says too little, counts by its size: loading it says why."""
    try:
        files = parts(path)
        num_bytes = sum(map(_size, files))
        headers = [read_header(part) for part in files]
        tensor_bytes = {name: size for header in headers for name, size in header.tensor_bytes.items()}
        facts = Facts(path, headers[0].fields)
        return gguf_shape(facts, tensor_bytes, headers[0].num_vocab or facts.number("vocab_size", 0), num_bytes)
    except (EdgespecError, AttributeError):  # AttributeError: a build of llama.cpp without this reader
        return ModelShape.of_file(_size(path))


def draft_shape(path: Path) -> ModelShape:
    """Of a draft folder by its manifest; what that leaves open, some megabytes of activations, counts as nothing. Of a
    published export the size of its files. Nothing is there: no bytes."""
    folder = path if path.is_dir() else path.parent
    named = "" if path.is_dir() else path.name  # weights are named after their graph
    num_bytes = sum(_size(file) for file in folder.glob("*") if file.name.startswith(named)) if path.exists() else 0
    try:
        manifest = DraftManifest.read(folder / MANIFEST)
    except EdgespecError:
        return ModelShape.of_file(num_bytes)
    heads, size, vocabulary = manifest.num_kv_heads, manifest.head_size, manifest.num_head_vocab
    layers = (heads,) * manifest.num_layers
    return ModelShape(layers, heads, size, size, 0, 0, vocabulary, manifest.num_ctx, num_bytes, 0)


def _size(path: Path) -> int:
    with contextlib.suppress(OSError, ValueError):
        return path.stat().st_size if path.is_file() else 0
    return 0
