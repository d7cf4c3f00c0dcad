"""What a pair takes of a device's memory, line by line, before anything is loaded; and what would fit instead.

Pure arithmetic. The formulas are compared with what llama.cpp reports in its log (tests/devices/test_memory.py), the
constants were measured on x86-64 Linux and say how.
"""

from __future__ import annotations

import collections.abc as abc
from dataclasses import dataclass, replace
from typing import Any

from edgespec.devices.profile import GIB, PLAIN_KV_TYPES
from edgespec.devices.sizes import CONTEXT_STEP, Setup, Where
from edgespec.errors import MemoryBudgetError

MIB = 2**20
NUM_BATCH = 512  # tokens one llama_decode evaluates: LlamaOptions.num_batch
CHUNK = 128  # prompt tokens the draft model reads at once: edgespec.drafters.onnx_fixed
FLOAT_BYTES = 4

# Resident size of the process before any model: Python, numpy and both backends take 62 MiB, an ONNX Runtime session
# 23 to 37 besides its weights, the token lists of a vocabulary of 49152 about 20.
PROCESS_BYTES = 128 * MIB
# Per GPU: the driver's context, kernels and scratch memory. A reserve, not a measurement.
GPU_BYTES = 512 * MIB


def num_rows(num_slots: int) -> int:
    """Most rows of logits a verification gives: LlamaOptions.max_rows."""
    return min(NUM_BATCH, 32 * (num_slots + 1))


@dataclass(frozen=True, slots=True)
class Line:
    """One thing that takes memory."""

    what: str
    bytes: int
    where: Where


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What a setup takes."""

    setup: Setup
    lines: tuple[Line, ...]

    def used_bytes(self, where: Where) -> int:
        return sum(line.bytes for line in self.lines if line.where == where)

    def missing_bytes(self, where: Where) -> int:
        return max(0, self.used_bytes(where) - self.setup.budget.bytes(where))

    @property
    def fits(self) -> bool:
        return not self.missing_bytes("main") and not self.missing_bytes("gpu")

    def text(self) -> tuple[str, ...]:
        """For people, a line each: the parts, then the sums against the budgets."""
        parts = [(line.what, line.bytes, "GPU" if line.where == "gpu" else "main") for line in self.lines]
        width = max(len(what) for what, _, _ in parts)
        found = [f"{what:{width}}  {size_text(size):>10}  {where}" for what, size, where in parts]
        return (*found, *(self._sum(where, width) for where in self._places()))

    def _places(self) -> tuple[Where, ...]:
        return ("main", "gpu") if self.used_bytes("gpu") else ("main",)

    def _sum(self, where: Where, width: int) -> str:
        name = _NAMES[where]
        used, budget, missing = self.used_bytes(where), self.setup.budget.bytes(where), self.missing_bytes(where)
        verdict = f"{size_text(missing)} too much" if missing else "fits"
        return f"{name:{width}}  {size_text(used):>10}  of {size_text(budget)}: {verdict}"

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        lines = [{"what": line.what, "bytes": line.bytes, "where": line.where} for line in self.lines]
        places = {f"{w}_bytes": self.used_bytes(w) for w in self._places()}
        budgets = {f"{w}_budget_bytes": self.setup.budget.bytes(w) for w in self._places()}
        return {"lines": lines, **places, **budgets, "fits": self.fits}

    def check(self, types: abc.Mapping[str, int] | None = None) -> None:
        """Raise MemoryBudgetError unless it fits. The error's ``plan`` ends with what would.

        ``types`` are other GGUF types that the verifier could have, and the size of the file each would make.
        """
        if self.fits:
            return
        places = [where for where in self._places() if self.missing_bytes(where)]
        budget = self.setup.budget
        sizes = [(size_text(self.used_bytes(w)), _NAMES[w], size_text(budget.bytes(w))) for w in places]
        parts = [f"{used} of {name}, and {most} may be taken" for used, name, most in sizes]
        remedies = what_fits(self.setup, types or {}) or ("smaller models, or another profile",)
        advice = tuple(f"would fit: {remedy}" for remedy in remedies)
        raise MemoryBudgetError(f"the pair takes {'; '.join(parts)}; {advice[0]}", (*self.text(), *advice))


_NAMES: dict[Where, str] = {"main": "main memory", "gpu": "GPU memory"}


def plan_memory(setup: Setup) -> MemoryPlan:
    parts = (_weights(setup), _cache(setup), _buffers(setup), _draft(setup), _overhead(setup))
    return MemoryPlan(setup, tuple(line for part in parts for line in part if line.bytes))


# ------------------------------------------------------------------------------------------------------------ verifier


def _weights(s: Setup) -> list[Line]:
    """llama.cpp keeps the embedding in main memory; a head that is the embedding is copied to the GPU."""
    v, num_layers = s.verifier, min(s.num_gpu_layers, s.verifier.num_layers)
    layers = (v.weights_bytes - v.embedding_bytes - v.output_bytes) * num_layers // max(1, v.num_layers)
    head = v.head_bytes if s.num_gpu_layers > v.num_layers else 0
    main = v.weights_bytes - layers - min(head, v.output_bytes)
    what = f"verifier weights {v.kind}".rstrip()
    return [Line(what, main, "main"), Line(what, layers + head, s.gpu)]


def _cache(s: Setup) -> list[Line]:
    v, num_layers = s.verifier, min(s.num_gpu_layers, s.verifier.num_layers)
    parts = (slice(0, v.num_layers - num_layers), slice(v.num_layers - num_layers, None))
    main, gpu = (v.kv_bytes(s.num_cells, s.kv_type_k, s.kv_type_v, part) for part in parts)
    what = f"verifier KV cache, {s.num_slots} x {s.context} tokens, {s.kv_type_k}/{s.kv_type_v}"
    return [Line(what, main, "main"), Line(what, gpu, s.gpu)]


def _buffers(s: Setup) -> list[Line]:
    """The rows of logits lie once in the compute buffer and once in a buffer that the caller reads."""
    v, rows = s.verifier, num_rows(s.num_slots)
    logits = Line(f"verify buffer, {rows} rows of logits", FLOAT_BYTES * rows * v.num_vocab, "main")
    whole, inputs = compute_bytes(s), _mask_bytes(s) + FLOAT_BYTES * _num_batch(s) * v.width
    all_on_gpu = s.num_gpu_layers > v.num_layers
    gpu = whole * s.budget.num_gpus if s.num_gpu_layers else 0
    main = inputs if all_on_gpu else whole
    return [logits, Line("verifier compute buffer", main, "main"), Line("verifier compute buffer", gpu, s.gpu)]


def compute_bytes(s: Setup) -> int:
    """llama.cpp's compute buffer: what the hungriest stage of a whole batch needs, in float32 values.

    Feed-forward: three hidden vectors and four of the model's width per token. Attention: queries three times, keys,
    values and two vectors of the model's width per token; without flash attention a score per head and cached token as
    well. Both beside the mask. Head: the rows of logits, and two vectors of the model's width per token and row.
    """
    v, batch, rows = s.verifier, _num_batch(s), num_rows(s.num_slots)
    keys = max(v.num_kv_heads, default=0) * (v.head_size_k + v.head_size_v)
    queries = v.num_heads * (2 * v.head_size_k + v.head_size_v)
    scores = 0 if s.flash_attention else v.num_heads * s.num_cells
    feed_forward = batch * (3 * v.num_hidden + 4 * v.width)
    attention = batch * (queries + keys + 2 * v.width + scores)
    head = rows * v.num_vocab + 2 * (batch + rows) * v.width
    return max(_mask_bytes(s) + FLOAT_BYTES * max(feed_forward, attention), FLOAT_BYTES * head)


def _num_batch(s: Setup) -> int:
    """Tokens llama.cpp reserves for: a multiple of the slots."""
    return -(-min(NUM_BATCH, s.context * s.num_slots) // s.num_slots) * s.num_slots


def _mask_bytes(s: Setup) -> int:
    """A value per token of the batch and cached token; layers with a window have a mask of their own."""
    return _num_batch(s) * s.num_cells * (2 if s.flash_attention else 4) * (1 + s.verifier.window)


# --------------------------------------------------------------------------------------------------- draft and process


def _draft(s: Setup) -> list[Line]:
    """ONNX Runtime repacks the head for its kernels, so one that is the embedding is kept twice."""
    d, where = s.draft, s.gpu if s.draft_on_gpu and s.budget.num_gpus else "main"
    if d is None:
        return []
    weights = d.weights_bytes + (0 if d.output_bytes else d.embedding_bytes)
    context = min(s.context, d.num_ctx)
    chunk = CHUNK * (3 * d.num_hidden + 4 * d.width + d.num_heads * context)
    buffers = FLOAT_BYTES * (s.num_slots * d.num_vocab + chunk)
    return [
        Line(f"draft weights {d.kind}".rstrip(), weights, where),
        Line(
            f"draft KV cache, {s.num_slots} x {context} tokens, f32",
            d.kv_bytes(s.num_slots * context, "f32", "f32"),
            where,
        ),
        Line("draft logits and activations", buffers, where),
    ]


def _overhead(s: Setup) -> list[Line]:
    gpu = GPU_BYTES * s.budget.num_gpus if s.num_gpu_layers or s.draft_on_gpu else 0
    return [Line("runtime", PROCESS_BYTES, "main"), Line("GPU runtime", gpu, s.gpu)]


def size_text(num_bytes: int) -> str:
    """For people: "1.50 GiB"."""
    if num_bytes >= GIB:
        return f"{num_bytes / GIB:.2f} GiB"
    return f"{num_bytes / MIB:.0f} MiB" if num_bytes >= MIB else f"{num_bytes / 1024:.0f} KiB"


# ---------------------------------------------------------------------------------------------------- what would fit


def what_fits(setup: Setup, types: abc.Mapping[str, int]) -> tuple[str, ...]:
    """Changes of a setup that would make it fit: each that does so alone, else several at once; none where none does.

    A context below a quarter of what was asked for counts only when nothing else helps. ``types`` as in
    MemoryPlan.check. Every answer was planned and fits.
    """
    shorter = _shorter(setup)
    if shorter is not None and 4 * shorter.context < setup.context:
        shorter = None
    alone = (_smaller_type(setup, types), _smaller_cache(setup), _fewer_gpu_layers(setup), shorter, _fewer_slots(setup))
    found = alone if any(alone) else (_all_at_once(setup, types),)
    return tuple(_difference(setup, change) for change in found if change is not None)


def _fitting(setups: abc.Iterable[Setup]) -> Setup | None:
    """The first that fits."""
    return next((setup for setup in setups if plan_memory(setup).fits), None)


def _types(s: Setup, types: abc.Mapping[str, int]) -> list[Setup]:
    """The setup with each smaller type, the largest first."""
    smaller = sorted(((size, kind) for kind, size in types.items() if size < s.verifier.weights_bytes), reverse=True)
    return [replace(s, verifier=s.verifier.resized(size, kind)) for size, kind in smaller]


def _smaller_type(s: Setup, types: abc.Mapping[str, int]) -> Setup | None:
    return _fitting(_types(s, types))


def _fewer_gpu_layers(s: Setup) -> Setup | None:
    return _fitting(replace(s, gpu_layers=count) for count in range(s.num_gpu_layers - 1, -1, -1))


def _smaller_cache(s: Setup) -> Setup | None:
    """Half the bytes at next to no loss; llama.cpp wants flash attention for it."""
    if not s.flash_attention or not {s.kv_type_k, s.kv_type_v}.intersection(PLAIN_KV_TYPES):
        return None
    k, v = ("q8_0" if kind in PLAIN_KV_TYPES else kind for kind in (s.kv_type_k, s.kv_type_v))
    smaller = replace(s, kv_type_k=k, kv_type_v=v)
    return _fitting([smaller] if smaller.cache_fits else [])


def _shorter(s: Setup) -> Setup | None:
    """The longest context that fits, by bisection: what is taken only grows with it."""
    fits, too_long = 0, -(-s.context // CONTEXT_STEP)
    while too_long - fits > 1:
        middle = (fits + too_long) // 2
        if plan_memory(replace(s, context=middle * CONTEXT_STEP)).fits:
            fits = middle
        else:
            too_long = middle
    return replace(s, context=fits * CONTEXT_STEP) if fits else None


def _fewer_slots(s: Setup) -> Setup | None:
    return _fitting(replace(s, num_slots=count) for count in range(s.num_slots - 1, 0, -1))


def _all_at_once(s: Setup, types: abc.Mapping[str, int]) -> Setup | None:
    """One slot and the largest type that leaves a quarter of the context, or the longest context there is."""
    found: Setup | None = None
    for candidate in (replace(setup, num_slots=1) for setup in (s, *_types(s, types))):
        change = _fitting([candidate]) or _fewer_gpu_layers(candidate) or _shorter(candidate)
        if change is not None and (found is None or change.context > found.context):
            found = change
        if found is not None and 4 * found.context >= s.context:
            break
    return found


def _difference(old: Setup, new: Setup) -> str:
    """In the words of a profile, sections included."""
    changes = []
    if new.verifier != old.verifier:
        changes.append(f"type {new.verifier.kind} ({size_text(new.verifier.weights_bytes)})")
    if new.gpu_layers != old.gpu_layers:
        changes.append(f"[verifier] gpu_layers {new.gpu_layers} of {old.verifier.num_layers}")
    if (new.kv_type_k, new.kv_type_v) != (old.kv_type_k, old.kv_type_v):
        changes.append(f"[verifier] kv_type_k/kv_type_v {new.kv_type_k}/{new.kv_type_v}")
    if new.context != old.context:
        changes.append(f"[serving] context {new.context} instead of {old.context}")
    if new.num_slots != old.num_slots:
        changes.append(f"[serving] max_batch_size {new.num_slots} instead of {old.num_slots}")
    return ", ".join(changes)
