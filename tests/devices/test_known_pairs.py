"""The profiles that the well-known pairs name really fit them, by the memory plan and the models' published sizes."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from edgespec.devices.memory import MemoryPlan, plan_memory
from edgespec.devices.profile import GIB, Profile, profile_files, read_profile
from edgespec.devices.sizes import Budget, ModelShape, Setup
from edgespec.pairs import load_recipe
from edgespec.pairs.sources import HubDraft, HubVerifier
from edgespec.paths import data_dir
from quantize.architecture import ARCHITECTURES
from quantize.gguf_shape import draft_shape
from quantize.rope import plain_rope
from quantize.source import Dimensions


@dataclass(frozen=True)
class Published:
    """Of config.json in the model's repository on huggingface.co: num_hidden_layers, hidden_size, num_attention_heads,
    num_key_value_heads, head_dim (hidden_size / num_attention_heads where it does not say), intermediate_size,
    vocab_size, max_position_embeddings, tie_word_embeddings."""

    architecture: str
    num_layers: int
    width: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    num_hidden: int
    num_vocab: int
    num_ctx: int
    tied: bool

    @property
    def num_weights(self) -> int:
        """Norms and biases left out."""
        attention = 2 * self.width * self.head_size * (self.num_heads + self.num_kv_heads)
        layer = attention + 3 * self.width * self.num_hidden
        return self.num_layers * layer + self.num_vocab * self.width * (1 if self.tied else 2)

    def verifier(self, size_bytes: int) -> ModelShape:
        """llama.cpp makes the embedding Q4_K, and a head, or an embedding that is the head too, Q6_K."""
        values = self.num_vocab * self.width
        q4_k, q6_k = values * 144 // 256, values * 210 // 256
        return ModelShape(
            (self.num_kv_heads,) * self.num_layers,
            self.num_heads,
            self.head_size,
            self.head_size,
            self.width,
            self.num_hidden,
            self.num_vocab,
            self.num_ctx,
            size_bytes,
            embedding_bytes=q6_k if self.tied else q4_k,
            output_bytes=0 if self.tied else q6_k,
            kind="Q4_K_M",
        )

    def draft(self, bits: int, block_size: int) -> ModelShape:
        sizes = {name: getattr(self, name) for name in Dimensions.__dataclass_fields__ if hasattr(self, name)}
        dimensions = Dimensions(**sizes, norm_epsilon=1e-6, attention_scale=1.0, rope=plain_rope(self.head_size, 1e4))
        source: Any = SimpleNamespace(
            dimensions=dimensions, tied=self.tied, architecture=ARCHITECTURES[self.architecture]
        )
        return draft_shape(source, bits, block_size)


# The verifier, the draft, and the size of the verifier's file as its repository's page lists it, in GB.
PAIRS = {
    "smollm2-1.7b": (  # HuggingFaceTB/SmolLM2-1.7B-Instruct, HuggingFaceTB/SmolLM2-135M-Instruct
        Published("llama", 24, 2048, 32, 32, 64, 8192, 49_152, 8192, True),
        Published("llama", 30, 576, 9, 3, 64, 1536, 49_152, 8192, True),
        1.06,
    ),
    "qwen2.5-7b": (  # Qwen/Qwen2.5-7B-Instruct, Qwen/Qwen2.5-0.5B-Instruct
        Published("qwen2", 28, 3584, 28, 4, 128, 18_944, 152_064, 32_768, False),
        Published("qwen2", 24, 896, 14, 2, 64, 4864, 151_936, 32_768, True),
        4.68,
    ),
    "qwen3-8b": (  # Qwen/Qwen3-8B, Qwen/Qwen3-0.6B
        Published("qwen3", 36, 4096, 32, 8, 128, 12_288, 151_936, 40_960, False),
        Published("qwen3", 28, 1024, 16, 8, 128, 3072, 151_936, 40_960, True),
        5.03,
    ),
    "llama-3.2-3b": (  # meta-llama/Llama-3.2-3B-Instruct, meta-llama/Llama-3.2-1B-Instruct
        Published("llama", 28, 3072, 24, 8, 128, 8192, 128_256, 131_072, True),
        Published("llama", 16, 2048, 32, 8, 64, 8192, 128_256, 131_072, True),
        2.02,
    ),
}
PROFILES = {file.name: read_profile(file.path) for file in profile_files() if not file.is_user}
MAIN_GIB = {"cpu-small": 8.0}  # a mini PC; boxes with a GPU have more
OTHERS_GIB = 16.0


def budget(profile: Profile) -> Budget:
    """The least that the profile is for; what it leaves open is 8 GiB for a small box and 16 GiB beside a GPU."""
    device, main_gib = profile.device, MAIN_GIB.get(profile.name, OTHERS_GIB)
    gpus = [int(device.min_gpu_memory_gib * GIB)] * device.min_gpus
    return Budget.of(device, int(main_gib * GIB), gpus)


def plan(pair: str, profile: Profile) -> MemoryPlan:
    """As the pair is pulled: its own file, whatever type the profile would make."""
    verifier, draft, size_gb = PAIRS[pair]
    recipe = load_recipe(pair)
    assert isinstance(recipe.draft, HubDraft)
    shape = draft.draft(recipe.draft.bits, recipe.draft.block_size)
    return plan_memory(Setup.of(profile, verifier.verifier(int(size_gb * 1e9)), shape, budget(profile)))


def test_every_pair_of_the_hub_is_looked_at() -> None:
    shipped = [load_recipe(path.stem) for path in data_dir("models").glob("*.toml")]
    assert {pair.name for pair in shipped if isinstance(pair.verifier, HubVerifier)} == set(PAIRS)


@pytest.mark.parametrize(("pair", "billions"), [
    ("smollm2-1.7b", (1.71, 0.1345)), ("qwen2.5-7b", (7.62, 0.494)), ("qwen3-8b", (8.19, 0.596)),
    ("llama-3.2-3b", (3.21, 1.236)),
])  # fmt: skip
def test_the_sizes_are_the_models(pair: str, billions: tuple[float, float]) -> None:
    """They come to the number of weights that the models' cards give, and the file to Q4_K_M's bits a weight."""
    verifier, draft, size_gb = PAIRS[pair]
    assert [model.num_weights / 1e9 for model in (verifier, draft)] == pytest.approx(billions, rel=0.005)
    assert 4.8 < 8 * size_gb * 1e9 / verifier.num_weights < 5.1


@pytest.mark.parametrize(("pair", "profile"), [(pair, name) for pair in PAIRS for name in load_recipe(pair).profiles])
def test_a_manifest_names_profiles_that_fit(pair: str, profile: str) -> None:
    """Not all that fit: a small box has the memory for a model of 7 billion weights, and not the patience."""
    found = plan(pair, PROFILES[profile])
    assert found.setup.cache_fits
    assert found.fits, "\n".join(found.text())


def test_what_does_not_fit_is_found_out() -> None:
    """Such as a whole head of 128,256 ids beside 3 billion weights in 5 GiB."""
    assert not plan("llama-3.2-3b", PROFILES["jetson-orin-nano-8gb"]).fits
