"""The sizes that decide a GGUF model's memory, from what its header says. Whoever reads the header hands it in: the
runtime by llama.cpp, the offline toolkit by a reader of its own.

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import collections.abc as abc
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from edgespec.devices.sizes import ModelShape
from edgespec.errors import ModelFormatError, ParameterError

# What a file may claim; more is damage, and would take the memory before it is found out.
MAX_SIZE, MAX_LAYERS = 2**31 - 1, 4096
_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


def parts(path: Path) -> tuple[Path, ...]:
    """All files of a model, named by its first; the path alone where its name is no part's. None need be there.

    Raises ParameterError for a later part.
    """
    split = _PART.fullmatch(path.name)
    if split is None:
        return (path,)
    stem, count = split["stem"], int(split["count"])
    if int(split["number"]) != 1:
        raise ParameterError(
            f"{path} is a later part of a split model; give its first, {stem}-00001-of-{count:05}.gguf"
        )
    return tuple(path.with_name(f"{stem}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1))


@dataclass(frozen=True, slots=True)
class Facts:
    """Checked access to a header's fields: numbers, bytes for a string, arrays of numbers. ``path`` is for messages.

    Numbers are the architecture's own: ``number("block_count")`` is "llama.block_count". Raises ModelFormatError where
    one is missing, no whole number, or out of range.
    """

    path: Path
    fields: abc.Mapping[str, Any]

    @property
    def architecture(self) -> str:
        return self.text("general.architecture")

    def text(self, key: str) -> str:
        value = self.fields.get(key, b"")
        return value.decode("utf-8", "replace") if isinstance(value, bytes) else ""

    def number(self, key: str, default: int | None = None, least: int = 0, limit: int = MAX_SIZE) -> int:
        """The value, or the largest of a list with one per layer."""
        return max(self.numbers(key, 1, default, least, limit))

    def numbers(
        self, key: str, count: int, default: int | None, least: int = 0, limit: int = MAX_SIZE
    ) -> tuple[int, ...]:
        """A value per layer; the file may state one for all."""
        name = f"{self.architecture}.{key}"
        value = self.fields.get(name, default)
        values = value.tolist() if isinstance(value, np.ndarray) and value.size else [value] * count
        if not all(type(each) is int and least <= each <= limit for each in values):
            raise ModelFormatError(
                f"model {self.path}: {name} is {value}; expected a number of {least} to {limit}, use another GGUF"
            )
        return tuple(values)


def gguf_shape(
    facts: Facts, tensor_bytes: abc.Mapping[str, int], num_vocab: int, num_bytes: int, kind: str = ""
) -> ModelShape:
    """Raises ModelFormatError where the header does not say enough.

    tensor_bytes  of each tensor, by its name
    num_bytes     of all files
    kind          the weights' type, for people
    """
    num_layers, width = facts.number("block_count", least=1, limit=MAX_LAYERS), facts.number("embedding_length")
    num_heads = max(facts.numbers("attention.head_count", num_layers, 0))
    default = width // num_heads if num_heads else 0
    per_expert, num_experts = facts.number("expert_feed_forward_length", 0), facts.number("expert_used_count", 0)
    return ModelShape(
        num_kv_heads=facts.numbers("attention.head_count_kv", num_layers, num_heads),
        num_heads=num_heads,
        head_size_k=facts.number("attention.key_length", default),
        head_size_v=facts.number("attention.value_length", default),
        width=width,
        num_hidden=max(*facts.numbers("feed_forward_length", num_layers, 0), per_expert * num_experts),
        num_vocab=num_vocab,
        num_ctx=facts.number("context_length"),
        weights_bytes=num_bytes,
        embedding_bytes=tensor_bytes.get("token_embd.weight", 0),
        output_bytes=tensor_bytes.get("output.weight", 0),
        window=facts.number("attention.sliding_window", 0) > 0,
        kind=kind,
    )
