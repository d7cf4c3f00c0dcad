"""What a memory plan is made of: the sizes of models, the budget, and how a pair is to run. Frozen, and no I/O."""

from __future__ import annotations

import collections.abc as abc
from dataclasses import dataclass, replace
from typing import Literal

from edgespec.devices.profile import GIB, Device, Profile

Where = Literal["main", "gpu"]

USABLE = 0.9  # of what a box has, where a profile leaves its budget open: the rest is the system's
UNKNOWN_CTX = 2**24  # tokens that a model is taken to be made for, where nobody knows: a profile's most
CONTEXT_STEP = 256  # llama.cpp pads its KV cache to a multiple of this

# Bytes and values of a block of llama.cpp's cache types.
KV_BLOCKS = {
    "f32": (4, 1),
    "f16": (2, 1),
    "bf16": (2, 1),
    "q8_0": (34, 32),
    "q5_1": (24, 32),
    "q5_0": (22, 32),
    "q4_1": (20, 32),
    "q4_0": (18, 32),
    "iq4_nl": (18, 32),
}


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes that decide what a decoder takes.

    num_kv_heads     key heads of each layer; 0 where a layer keeps no keys
    num_hidden       widest feed-forward layer, of all experts that work at once
    num_vocab        logits in a row
    num_ctx          most tokens it was made for
    weights_bytes    of the whole file, embedding and head included
    embedding_bytes  of the token embedding
    output_bytes     of the output head; 0 where it is the embedding
    window           whether some layers see a sliding window only (they keep the whole context all the same)
    kind             the weights' type, for people: "Q4_K_M", "int8"
    """

    num_kv_heads: tuple[int, ...]
    num_heads: int
    head_size_k: int
    head_size_v: int
    width: int
    num_hidden: int
    num_vocab: int
    num_ctx: int
    weights_bytes: int
    embedding_bytes: int
    output_bytes: int = 0
    window: bool = False
    kind: str = ""

    @classmethod
    def of_file(cls, weights_bytes: int, num_layers: int = 1) -> ModelShape:
        """A model of which only the file is known: weights in equal layers, and nothing beside them."""
        return cls((0,) * num_layers, 0, 0, 0, 0, 0, 0, UNKNOWN_CTX, weights_bytes, 0)

    @property
    def num_layers(self) -> int:
        return len(self.num_kv_heads)

    @property
    def head_bytes(self) -> int:
        return self.output_bytes or self.embedding_bytes

    def kv_bytes(self, num_tokens: int, kind_k: str, kind_v: str, layers: slice = slice(None)) -> int:
        """Keys and values of so many tokens, of some of the layers."""
        num_heads, sizes = sum(self.num_kv_heads[layers]), ((kind_k, self.head_size_k), (kind_v, self.head_size_v))
        return sum(_blocks(num_tokens * num_heads * size, kind) for kind, size in sizes)

    def resized(self, weights_bytes: int, kind: str) -> ModelShape:
        """The same model with weights of another type, embedding and head in proportion."""
        ratio = weights_bytes / max(1, self.weights_bytes)
        return replace(
            self,
            weights_bytes=weights_bytes,
            embedding_bytes=int(self.embedding_bytes * ratio),
            output_bytes=int(self.output_bytes * ratio),
            kind=kind,
        )


def _blocks(num_values: int, kind: str) -> int:
    num_bytes, per_block = KV_BLOCKS[kind]
    return -(-num_values * num_bytes // per_block)


@dataclass(frozen=True, slots=True)
class Budget:
    """What may be taken. Without a GPU, and where it shares the main memory, ``gpu_bytes`` is 0."""

    main_bytes: int
    gpu_bytes: int = 0
    num_gpus: int = 0

    @classmethod
    def of(cls, device: Device, main_bytes: int, gpus_bytes: abc.Sequence[int] = ()) -> Budget:
        """The profile's budgets. What it leaves open is nine tenths of what the box has; where the box has not the GPUs
        that the profile wants, of what it wants: pairs are made for other boxes too.

        main_bytes, gpus_bytes  the box's main memory, and the own memory of each of its GPUs
        """
        main_bytes = int(device.memory_budget_gib * GIB) or int(USABLE * main_bytes)
        if device.unified_memory:
            return cls(main_bytes, 0, max(1, device.min_gpus))
        wanted_bytes = int(device.min_gpu_memory_gib * GIB)
        num_wanted = max(device.min_gpus, 1 if wanted_bytes else 0)
        if sum(size >= wanted_bytes for size in gpus_bytes) < num_wanted:
            gpus_bytes = [wanted_bytes] * num_wanted
        gpu_bytes = int(device.gpu_memory_budget_gib * GIB) or int(USABLE * sum(gpus_bytes))
        return cls(main_bytes, gpu_bytes, max(1, len(gpus_bytes)) if gpu_bytes else 0)

    def bytes(self, where: Where) -> int:
        return self.main_bytes if where == "main" else self.gpu_bytes


@dataclass(frozen=True, slots=True)
class Setup:
    """A pair and how it is to run. ``draft`` is None where no draft model is loaded; the rest is in Profile's words."""

    verifier: ModelShape
    draft: ModelShape | None
    budget: Budget
    context: int
    num_slots: int = 1
    kv_type_k: str = "f16"
    kv_type_v: str = "f16"
    flash_attention: bool = True
    gpu_layers: int = -1
    draft_on_gpu: bool = False

    @classmethod
    def of(cls, profile: Profile, verifier: ModelShape, draft: ModelShape | None, budget: Budget) -> Setup:
        return cls(
            verifier,
            draft,
            budget,
            context=min(profile.serving.context, verifier.num_ctx),
            num_slots=profile.serving.max_batch_size,
            kv_type_k=profile.verifier.kv_type_k,
            kv_type_v=profile.verifier.kv_type_v,
            flash_attention=profile.verifier.flash_attention != "off",
            gpu_layers=profile.verifier.gpu_layers,
            draft_on_gpu=profile.draft.provider != "cpu",
        )

    @property
    def gpu(self) -> Where:
        """Where the GPU's part counts."""
        return "gpu" if self.budget.gpu_bytes else "main"

    @property
    def num_gpu_layers(self) -> int:
        """Layers on the GPU: the last ones, and the head only when all are. llama.cpp counts it as one more."""
        most = self.verifier.num_layers + 1
        wanted = most if self.gpu_layers < 0 else min(self.gpu_layers, most)
        return wanted if self.budget.num_gpus else 0

    @property
    def num_cells(self) -> int:
        """Tokens the verifier's cache has place for."""
        return -(-self.context * self.num_slots // CONTEXT_STEP) * CONTEXT_STEP

    @property
    def cache_fits(self) -> bool:
        """Whether the cache's types can hold this verifier's heads: a block of one may not reach into the next."""
        sizes = ((self.kv_type_k, self.verifier.head_size_k), (self.kv_type_v, self.verifier.head_size_v))
        return all(size % KV_BLOCKS[kind][1] == 0 for kind, size in sizes)
