"""Importance matrices for tiny models, in both formats."""

from __future__ import annotations

import collections.abc as abc
import struct
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray

from tests.tiny import TinyConfig, weights

NUM_CALLS = 4


def importances(config: TinyConfig) -> dict[str, NDArray[np.float32]]:
    """What matters in each input of every matrix but the embedding table, as llama-imatrix would find it."""
    random = np.random.default_rng(7)
    matrices = {name: values for name, values in weights(config).items() if values.ndim == 2 and name != "token_embd"}
    return {f"{name}.weight": random.random(values.shape[1], np.float32) ** 4 for name, values in matrices.items()}


def write_legacy(path: Path, config: TinyConfig, entries: abc.Mapping[str, NDArray[np.float32]] | None = None) -> Path:
    entries = importances(config) if entries is None else entries
    content = struct.pack("<i", len(entries))
    for name, values in entries.items():
        content += struct.pack("<i", len(name.encode())) + name.encode() + struct.pack("<ii", NUM_CALLS, len(values))
        content += (values * NUM_CALLS).astype("<f4").tobytes()
    path.write_bytes(content + struct.pack("<ii", NUM_CALLS, 4) + b"text")
    return path


def write_gguf_imatrix(
    path: Path, config: TinyConfig, entries: abc.Mapping[str, NDArray[np.float32]] | None = None
) -> Path:
    entries = importances(config) if entries is None else entries
    writer = gguf.GGUFWriter(path, "")
    writer.add_type("imatrix")
    writer.add_array("imatrix.datasets", ["text"])
    writer.add_uint32("imatrix.chunk_count", 1)
    writer.add_uint32("imatrix.chunk_size", 512)
    for name, values in entries.items():
        writer.add_tensor(f"{name}.in_sum2", (values * 512).reshape(1, -1))
        writer.add_tensor(f"{name}.counts", np.full((1, 1), 512, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
