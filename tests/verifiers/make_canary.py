"""Makes edgespec/verifiers/canary.gguf: ``python -m tests.verifiers.make_canary``. The same bytes every time."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind

CANARY = Path(__file__).parents[2] / "edgespec" / "verifiers" / "canary.gguf"
WIDTH, HIDDEN, NUM_VOCAB, NUM_HEADS = 64, 96, 64, 2

# Rows and row lengths are multiples of 32, as ggml's AMX and repacked kernels want them.
MATRICES = {
    "token_embd.weight": (NUM_VOCAB, WIDTH, Kind.Q8_0),
    "blk.0.attn_q.weight": (WIDTH, WIDTH, Kind.Q4_0),
    "blk.0.attn_k.weight": (WIDTH, WIDTH, Kind.Q4_1),
    "blk.0.attn_v.weight": (WIDTH, WIDTH, Kind.Q8_0),
    "blk.0.attn_output.weight": (WIDTH, WIDTH, Kind.Q4_0),
    "blk.0.ffn_gate.weight": (HIDDEN, WIDTH, Kind.Q4_0),
    "blk.0.ffn_up.weight": (HIDDEN, WIDTH, Kind.Q4_1),
    "blk.0.ffn_down.weight": (WIDTH, HIDDEN, Kind.Q8_0),
    "output.weight": (NUM_VOCAB, WIDTH, Kind.Q8_0),
}
NORMS = ("blk.0.attn_norm.weight", "blk.0.ffn_norm.weight", "output_norm.weight")


def make(path: Path) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    add_metadata(writer)
    random = np.random.default_rng(0)
    for name, (num_rows, length, kind) in MATRICES.items():
        weights = random.standard_normal((num_rows, length), dtype=np.float32) / np.sqrt(length)
        writer.add_tensor(name, gguf.quantize(weights.astype(np.float32), kind), raw_dtype=kind)
    for name in NORMS:
        writer.add_tensor(name, np.ones(WIDTH, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_metadata(writer: gguf.GGUFWriter) -> None:
    writer.add_name("canary")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(NUM_HEADS)
    writer.add_head_count_kv(NUM_HEADS)
    writer.add_rope_dimension_count(WIDTH // NUM_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(NUM_VOCAB)
    writer.add_tokenizer_model("none")


if __name__ == "__main__":
    make(CANARY)
