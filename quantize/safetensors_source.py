"""Reads a Hugging Face checkpoint folder: config.json, tokenizer.json, and the weights of one or several .safetensors
files as float32, a few rows at a time. Nothing here is written to."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from edgespec.errors import ModelFormatError, ModelNotFoundError
from quantize.architecture import Architecture
from quantize.checkpoint_config import CheckpointConfig, read_config, read_json
from quantize.extras import require
from quantize.safetensors_file import DTYPES, Floats, StoredMatrix, StoredTensor, read_header, short
from quantize.source import Dimensions, file_sha256, tensors

CONFIG, TOKENIZER, WEIGHTS, INDEX = "config.json", "tokenizer.json", "model.safetensors", "model.safetensors.index.json"

_HEAD, _EMBEDDING = "output.weight", "token_embd.weight"
_ROWS_AT_ONCE = 1024

# Tables that follow from the config, which older checkpoints store; and what a model of text and images has besides.
_DERIVED = re.compile(r"(.+\.)?rotary_emb\.(inv_freq|cos_cached|sin_cached)")
_IMAGES = re.compile(r"(model\.)?(vision_tower|multi_modal_projector)\..+")


@dataclass(frozen=True, slots=True)
class SafetensorsSource:
    """An opened checkpoint; see source.Source. ``stored`` has its tensors by their GGUF names."""

    path: Path
    architecture: Architecture
    dimensions: Dimensions
    tokens: tuple[str, ...]
    tied: bool
    stored: dict[str, StoredTensor]
    pairs_neighbours: bool = False

    def matrix(self, name: str) -> StoredMatrix:
        return StoredMatrix(self.stored[name])

    def vector(self, name: str) -> Floats:
        tensor = self.stored[name]
        values = tensor.read(0, tensor.shape[0])
        return values + np.float32(self.architecture.norm_offset) if name.endswith("norm.weight") else values

    def sha256(self) -> str:
        """See Source.sha256."""
        digest = hashlib.sha256()
        for path in sorted({self.path / CONFIG, *(tensor.path for tensor in self.stored.values())}):
            digest.update(path.name.encode("utf-8", "surrogateescape") + b"\0" + bytes.fromhex(file_sha256(path)))
        return digest.hexdigest()


def open_checkpoint(folder: Path) -> SafetensorsSource:
    """Read the config, the tokens and the headers, and check that every tensor is there, with the right shape.

    Raises ModelNotFoundError, FileAccessError (no permission), ModelFormatError (truncated, corrupt, unsupported), or
    MissingDependencyError without the ``tokenizers`` package.
    """
    config = read_config(folder / CONFIG)
    found = _language_model(_read_weights(folder), config.nested)
    stored = {}
    for name, (checkpoint_name, tensor) in tensors(config.architecture, config.dimensions.num_layers).items():
        shape = config.dimensions.shape(tensor)
        if checkpoint_name in found:
            stored[name] = _checked(found.pop(checkpoint_name), shape)
        elif not tensor.optional:
            raise ModelFormatError(f"{folder} has no tensor {checkpoint_name}; it is incomplete, download it again")
    if unknown := sorted(found):  # a bias or an expert: leaving it out would be another model
        raise ModelFormatError(
            f"{folder} has a tensor {short(unknown[0])}, which is not supported; use another checkpoint"
        )
    tied = _tied(folder, config, stored)
    tokens = read_tokens(folder, config.dimensions.num_vocab)
    return SafetensorsSource(folder, config.architecture, config.dimensions, tokens, tied, stored)


# ------------------------------------------------------------------------------------------------------------- weights


def _read_weights(folder: Path) -> dict[str, StoredTensor]:
    """The headers of all weight files, by the names they use."""
    if (folder / WEIGHTS).exists() or not (folder / INDEX).exists():
        if not (folder / WEIGHTS).exists():
            raise ModelNotFoundError(f"{folder / WEIGHTS} is not there, nor is {INDEX}; weights must be safetensors")
        return read_header(folder / WEIGHTS)
    places = _places(folder / INDEX)
    found: dict[str, StoredTensor] = {}
    for shard in sorted(set(places.values())):
        found |= read_header(folder / shard)
    for name, shard in places.items():
        if name not in found or found[name].path.name != shard:
            raise ModelFormatError(
                f"{folder / INDEX} places {short(name)} in {shard}, which lacks it; download both again"
            )
    return found


def _places(index: Path) -> dict[str, str]:
    """Tensor name -> file name, of files beside the index only."""
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise ModelFormatError(f"{index} has no weight_map; download it again")
    for name in places.values():
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors") or "\0" in name:
            raise ModelFormatError(f"{index} names {short(repr(name))}; allowed: .safetensors files in its own folder")
    return places


def _language_model(found: dict[str, StoredTensor], nested: bool) -> dict[str, StoredTensor]:
    """Without what does not matter for text, and with the names of a model that has only text."""
    kept = {name: tensor for name, tensor in found.items() if not _DERIVED.fullmatch(name)}
    if not nested:
        return kept
    kept = {name: tensor for name, tensor in kept.items() if not _IMAGES.fullmatch(name)}
    renamed = (re.sub(r"^(language_model\.|model\.language_model\.)(model\.)?", "", name) for name in kept)
    names = (name if name.startswith(("lm_head.", "model.")) else f"model.{name}" for name in renamed)
    return dict(zip(names, kept.values(), strict=True))


def _checked(tensor: StoredTensor, shape: tuple[int, ...]) -> StoredTensor:
    if tensor.shape != shape:
        raise ModelFormatError(
            f"{tensor.path}: tensor {tensor.name} is {tensor.shape}; its config.json asks for {shape}; use another one"
        )
    if tensor.dtype not in DTYPES:
        raise ModelFormatError(
            f"{tensor.path}: tensor {tensor.name} is stored as {short(tensor.dtype)}; supported: {', '.join(DTYPES)}; "
            "use another checkpoint"
        )
    return tensor


def _tied(folder: Path, config: CheckpointConfig, stored: dict[str, StoredTensor]) -> bool:
    """As the config says, where the tensors allow it; without a word from it, whether there is no head."""
    if _HEAD not in stored:
        if config.tied is False:
            raise ModelFormatError(
                f"{folder} has no tensor lm_head.weight, and tie_word_embeddings is false; download it again"
            )
        return True
    if config.tied and not _equal(StoredMatrix(stored[_HEAD]), StoredMatrix(stored[_EMBEDDING])):
        raise ModelFormatError(
            f"{folder} says tie_word_embeddings and has another lm_head.weight than embedding; correct its config.json"
        )
    if config.tied:
        del stored[_HEAD]
    return bool(config.tied)


def _equal(one: StoredMatrix, other: StoredMatrix) -> bool:
    starts = range(0, one.shape[0], _ROWS_AT_ONCE)
    spans = ((start, min(start + _ROWS_AT_ONCE, one.shape[0])) for start in starts)
    return all(np.array_equal(one.read(*span), other.read(*span)) for span in spans)


# -------------------------------------------------------------------------------------------------------------- tokens


def open_tokenizer(folder: Path) -> Any:
    """The ``tokenizers.Tokenizer`` of a checkpoint's tokenizer.json.

    Raises ModelNotFoundError, ModelFormatError or MissingDependencyError.
    """
    path = folder / TOKENIZER
    require("tokenizers")
    import tokenizers

    if not path.is_file():
        raise ModelNotFoundError(f"{path} is not there; download it, or save the tokenizer in this form")
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises nothing more special
        raise ModelFormatError(f"{path} is not a tokenizer ({short(error)}); download it again") from error


def read_tokens(folder: Path, num_vocab: int) -> tuple[str, ...]:
    """Raw token texts by id, "" where an id has none. A special token beyond the vocabulary is left out: Gemma 3 has
    one for images, without an embedding. Raises as ``open_tokenizer``, and ModelFormatError for any other such token.
    """
    tokenizer = open_tokenizer(folder)
    special = {token for token, added in tokenizer.get_added_tokens_decoder().items() if added.special}
    ids = sorted(tokenizer.get_vocab(with_added_tokens=True).values())
    if beyond := [token for token in ids if token >= num_vocab and token not in special]:
        raise ModelFormatError(
            f"{folder / TOKENIZER} has a token {beyond[-1]}, and the model a vocabulary of {num_vocab}; they do not "
            "belong together, download both again"
        )
    texts: dict[int, str] = {token: tokenizer.id_to_token(token) for token in ids if token < num_vocab}
    if not texts:
        raise ModelFormatError(f"{folder / TOKENIZER} has no tokens; download it again")
    return tuple(texts.get(token, "") for token in range(num_vocab))
