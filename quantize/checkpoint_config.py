"""Reads a Hugging Face checkpoint's config.json: which architecture it is and how large, and what it asks for that the
graph cannot do.

Keys as transformers 4 and 5 write them: https://huggingface.co/docs/transformers/main_classes/configuration.
"""

from __future__ import annotations

import collections.abc as abc
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from edgespec.devices.gguf_sizes import MAX_LAYERS, MAX_SIZE
from edgespec.errors import ModelFormatError, ModelNotFoundError
from quantize.architecture import ARCHITECTURES, Activation, Architecture
from quantize.rope import Rope, linear_rope, llama3_rope, plain_rope, yarn_rope
from quantize.safetensors_file import short, unreadable
from quantize.source import Dimensions, check_heads

FULL, WINDOW = "full_attention", "sliding_attention"
SUPPORTED_ROPES = ("default", "linear", "llama3", "yarn")
MAX_NUMBER = 1e30

# What a config.json may leave out, by model_type: published ones of Gemma 3 name little more than what differs.
_GEMMA3: dict[str, Any] = {
    "vocab_size": 262208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 4096},
    "qwen3": {"head_dim": 128},
    "gemma3_text": _GEMMA3,
    "gemma3": _GEMMA3,
}
_ACTIVATIONS: dict[Activation, tuple[str, ...]] = {"silu": ("silu", "swish"), "gelu_tanh": ("gelu_pytorch_tanh",)}
# Keys that ask for something the graph does not have, unless they are null or false.
_UNSUPPORTED = ("mlp_bias", "use_bidirectional_attention", "attn_logit_softcapping", "final_logit_softcapping")
_UNSUPPORTED_ROPE = ("mrope_section", "mscale", "mscale_all_dim")


@dataclass(frozen=True, slots=True)
class CheckpointConfig:
    """
    tied      whether the output head is the embedding table; None where the config does not say
    nested    whether the language model is a part of a larger one, which sees images
    """

    architecture: Architecture
    dimensions: Dimensions
    tied: bool | None
    nested: bool


def read_config(path: Path) -> CheckpointConfig:
    """Raises ModelNotFoundError, FileAccessError, or ModelFormatError for what is missing, wrong or unsupported."""
    keys = _Keys(path, read_json(path))
    model_type = str(keys.values.get("model_type", "missing"))
    supported = {name: architecture for architecture in ARCHITECTURES.values() for name in architecture.model_types}
    if model_type not in supported:
        keys.refuse("model_type", model_type, supported)
    text = keys.section("text_config")
    reader = _Reader(_Keys(path, {**_DEFAULTS.get(model_type, {}), **keys.values, **text}), supported[model_type])
    reader.check_supported()
    tied = reader.keys.flag("tie_word_embeddings") if "tie_word_embeddings" in reader.keys.values else None
    return CheckpointConfig(reader.architecture, reader.dimensions(), tied, bool(text))


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises ModelNotFoundError, FileAccessError or ModelFormatError."""
    try:
        if not path.is_file():
            raise ModelNotFoundError(f"{path} is not there; give a GGUF file, or the whole folder of a checkpoint")
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise unreadable(path, error) from error
    except (ValueError, RecursionError) as error:
        raise ModelFormatError(f"{path} is not JSON ({short(error)}); download it again") from error
    if not isinstance(content, dict):
        raise ModelFormatError(f"{path} holds no JSON object; download it again")
    return content


@dataclass(frozen=True, slots=True)
class _Keys:
    """Checked access to a JSON object; null counts as missing."""

    path: Path
    values: abc.Mapping[str, Any]

    def refuse(self, what: str, got: object, allowed: abc.Iterable[object]) -> NoReturn:
        names = ", ".join(map(str, allowed))
        raise ModelFormatError(f"{self.path} has {what} {short(got)}; supported: {names}; use another checkpoint")

    def _expect(self, valid: bool, key: str, expected: str) -> None:
        if not valid:
            got = "missing" if self.values.get(key) is None else short(self.values[key])
            raise ModelFormatError(f"{self.path}: {key} is {got}; expected {expected}; use another checkpoint")

    def size(self, key: str, default: int | None = None, most: int = MAX_SIZE) -> int:
        value = self.values.get(key)
        value = default if value is None else value
        self._expect(type(value) is int and 1 <= value <= most, key, f"a whole number from 1 to {most}")
        return int(value or 0)

    def positive(self, key: str, default: float | None = None, *, least: float = 0.0) -> float:
        value = self.values.get(key)
        value = default if value is None else value
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        self._expect(number and least < (value or 0) <= MAX_NUMBER, key, f"a number above {least:g}")
        return float(value or 0)

    def flag(self, key: str) -> bool:
        value = self.values.get(key)
        self._expect(value is None or isinstance(value, bool), key, "true or false")
        return bool(value)

    def section(self, key: str) -> dict[str, Any]:
        """An object, empty where there is none."""
        value = self.values.get(key)
        self._expect(value is None or isinstance(value, dict), key, "an object")
        return dict(value or {})


@dataclass(frozen=True, slots=True)
class _Reader:
    keys: _Keys
    architecture: Architecture

    def check_supported(self) -> None:
        keys = self.keys
        for key in ("quantization_config", "compression_config"):
            if (section := keys.section(key)) or keys.values.get(key):
                keys.refuse("quantized weights,", section.get("quant_method", key), ("F32", "F16", "BF16 weights"))
        biased = () if self.architecture.has("attn_q.bias") else ("attention_bias",)
        for key in (*biased, *_UNSUPPORTED):
            if keys.values.get(key):
                keys.refuse(key, keys.values[key], ("null or false",))
        for key in ("hidden_act", "hidden_activation"):
            if keys.values.get(key) not in (None, *(allowed := _ACTIVATIONS[self.architecture.activation])):
                keys.refuse(key, keys.values[key], allowed)
        num_heads = keys.size("num_attention_heads")
        check_heads(str(keys.path), num_heads, keys.size("num_key_value_heads", num_heads), self.head_size)

    def dimensions(self) -> Dimensions:
        keys, (window, window_layers) = self.keys, self.windows()
        rope = self.rope(FULL)
        return Dimensions(
            num_layers=self.num_layers,
            width=keys.size("hidden_size"),
            num_heads=keys.size("num_attention_heads"),
            num_kv_heads=keys.size("num_key_value_heads", keys.size("num_attention_heads")),
            head_size=self.head_size,
            num_hidden=keys.size("intermediate_size"),
            num_vocab=keys.size("vocab_size"),
            num_ctx=keys.size("max_position_embeddings"),
            norm_epsilon=keys.positive("rms_norm_eps"),
            attention_scale=keys.positive("query_pre_attn_scalar", self.head_size) ** -0.5,
            rope=rope,
            window=window,
            window_rope=self.rope(WINDOW) if window else None,
            window_layers=window_layers,
        )

    @property
    def num_layers(self) -> int:
        return self.keys.size("num_hidden_layers", most=MAX_LAYERS)

    @property
    def head_size(self) -> int:
        width, num_heads = self.keys.size("hidden_size"), self.keys.size("num_attention_heads")
        if self.keys.values.get("head_dim") is None and width % num_heads:
            self.keys.refuse("hidden_size", width, (f"multiples of its {num_heads} heads, or a head_dim",))
        return self.keys.size("head_dim", width // num_heads)

    # ----------------------------------------------------------------------------------------------------- windows

    def windows(self) -> tuple[int, frozenset[int]]:
        """Tokens that the layers with a window see, and which layers those are; 0 and none where all see everything."""
        layers = self.window_layers()
        if not layers:
            return 0, layers
        window = self.keys.size("sliding_window")
        if window >= self.keys.size("max_position_embeddings") and not self.architecture.window_pattern:
            return 0, frozenset()  # it never closes, and these layers rotate like the others
        return window, layers

    def window_layers(self) -> frozenset[int]:
        values, every = self.keys.values, range(self.num_layers)
        if values.get("layer_types") is not None:
            return self.named_layers(values["layer_types"])
        if self.architecture.window_pattern:
            pattern = self.keys.size("sliding_window_pattern", self.architecture.window_pattern)
            return frozenset(i for i in every if (i + 1) % pattern)
        if values["model_type"] == "mistral":
            return frozenset(every if values.get("sliding_window") is not None else ())
        if self.keys.flag("use_sliding_window"):
            first = 0 if values.get("max_window_layers") == 0 else self.keys.size("max_window_layers", 28)
            return frozenset(every[first:])
        return frozenset()

    def named_layers(self, kinds: Any) -> frozenset[int]:
        if not isinstance(kinds, list) or len(kinds) != self.num_layers or any(k not in (FULL, WINDOW) for k in kinds):
            self.keys.refuse("layer_types", kinds, (f"{FULL} or {WINDOW} for each of {self.num_layers}",))
        return frozenset(i for i, kind in enumerate(kinds) if kind == WINDOW)

    # -------------------------------------------------------------------------------------------------------- rope

    def rope(self, kind: str) -> Rope:
        """The rotation of the layers of that kind."""
        keys = _Keys(self.keys.path, self.rope_keys(kind))
        scaling = str(keys.values.get("rope_type") or keys.values.get("type") or "default")
        if keys.values.get("partial_rotary_factor") not in (None, 1):
            keys.refuse("partial_rotary_factor", keys.values["partial_rotary_factor"], (1,))
        if unknown := [key for key in _UNSUPPORTED_ROPE if keys.values.get(key)]:
            keys.refuse("rope parameter", unknown[0], ("none such",))
        size, base = self.head_size, keys.positive("rope_theta", 10000.0, least=1.0)
        if scaling == "default":
            return plain_rope(size, base)
        if scaling == "linear":
            return linear_rope(size, base, keys.positive("factor"))
        if scaling == "llama3":
            low = keys.positive("low_freq_factor")
            high = keys.positive("high_freq_factor", least=low)
            return llama3_rope(size, base, keys.positive("factor"), low, high, self.original_ctx(keys))
        return self.yarn(keys, base) if scaling == "yarn" else keys.refuse("rope scaling", scaling, SUPPORTED_ROPES)

    def rope_keys(self, kind: str) -> dict[str, Any]:
        """What transformers 5 writes as rope_parameters, perhaps for each kind of layer, and 4 as rope_scaling."""
        own_window = kind == WINDOW and self.architecture.window_pattern  # else both kinds rotate alike
        newer, older = self.keys.section("rope_parameters"), self.keys.section("rope_scaling")
        for name in (FULL, WINDOW):  # an object for each kind
            if name in newer:
                _Keys(self.keys.path, newer).section(name)
        base = self.keys.values.get("rope_local_base_freq" if own_window else "rope_theta")
        found = {"rope_theta": base, "partial_rotary_factor": self.keys.values.get("partial_rotary_factor")}
        if FULL in newer or WINDOW in newer:
            return found | (newer.get(kind) or {})
        return found if own_window else found | (newer or older)

    def yarn(self, keys: _Keys, base: float) -> Rope:
        if keys.values.get("truncate") is False:
            keys.refuse("rope parameter truncate", "false", ("true",))
        slow = keys.positive("beta_slow", 1.0)
        fast = keys.positive("beta_fast", 32.0)
        given = keys.values.get("attention_factor") is not None
        factor, magnitude = keys.positive("factor"), keys.positive("attention_factor") if given else None
        return yarn_rope(self.head_size, base, factor, self.original_ctx(keys), fast, slow, magnitude)

    def original_ctx(self, keys: _Keys) -> int:
        """The context before scaling; some configs say it beside the rope's keys, not among them."""
        key = "original_max_position_embeddings"
        return keys.size(key, self.keys.size(key, self.keys.size("max_position_embeddings")))
