"""A model in, a draft folder out: the graph, its weights, its vocabulary and the manifest that describes them."""

from __future__ import annotations

import collections.abc as abc
import importlib.metadata
import json
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import tomli_w

from edgespec.errors import ParameterError
from quantize.extras import require
from quantize.folder import new_folder

if TYPE_CHECKING:
    from quantize.onnx_builder import Recipe
    from quantize.source import Source

MANIFEST, MODEL, TOKENS, HEAD = "draft.toml", "model.onnx", "tokens.json", "d2t.npy"
FORMAT = 1

Progress = abc.Callable[[str, float], None]
NO_FACTS: abc.Mapping[str, object] = {}


def build_draft(
    source: Path,
    out: Path,
    *,
    bits: int = 8,
    block_size: int = 32,
    layers: abc.Sequence[int] | None = None,
    head: abc.Sequence[int] | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> Path:
    """Make a draft folder (README.md) of a GGUF file or a checkpoint's folder and return ``out``.

    bits        4 or 8 per weight in blocks, 32 for none of it
    block_size  inputs that share a scale
    layers      the layers to keep, in order; all by default
    head        the token ids the draft may propose; all by default
    force       replace ``out`` if it is a draft folder
    progress    called on this thread with what is being done and the finished fraction, 0 to 1

    ``out`` appears whole or not at all, and concurrent calls do not disturb each other. Raises ParameterError,
    ModelNotFoundError, ModelFormatError, FileAccessError, or MissingDependencyError when the extra is not installed.
    """
    require("gguf", "onnx", "onnx_ir")
    from quantize.source import open_source

    report = progress or (lambda stage, fraction: None)
    report("reading", 0.0)
    opened = open_source(source)
    return build_draft_of(
        opened, out, bits=bits, block_size=block_size, layers=layers, head=head, force=force, progress=progress
    )


def build_draft_of(
    source: Source,
    out: Path,
    *,
    bits: int = 8,
    block_size: int = 32,
    embedding_bits: int | None = None,
    layers: abc.Sequence[int] | None = None,
    head: abc.Sequence[int] | None = None,
    facts: abc.Mapping[str, object] = NO_FACTS,
    force: bool = False,
    progress: Progress | None = None,
) -> Path:
    """``build_draft`` of an opened source.

    embedding_bits  of the embedding table, where it is not to be as the other weights
    facts           more to be said in the manifest, under names it does not have

    Raises ValueError for a name that it has.
    """
    require("onnx", "onnx_ir")
    from quantize.onnx_builder import Recipe, check_recipe

    report = progress or (lambda stage, fraction: None)
    kept = tuple(range(source.dimensions.num_layers)) if layers is None else tuple(layers)
    recipe = Recipe(bits, block_size, kept, None if head is None else _ids(head), embedding_bits)
    check_recipe(recipe, source.dimensions)
    with new_folder(out, MANIFEST, force=force, sources=(source.path,)) as folder:
        _write(folder, source, recipe, facts, report)
    report("done", 1.0)
    return out


def _ids(head: abc.Sequence[int]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Ascending, so that among equal logits the first is the lowest id, as in the verifier."""
    ids = np.asarray(head)
    if ids.ndim != 1 or (ids.size and not np.issubdtype(ids.dtype, np.integer)):
        raise ParameterError(f"head: got {ids.dtype} values of shape {ids.shape}; allowed: a list of token ids")
    return np.unique(ids.astype(np.int64))


def _write(folder: Path, source: Source, recipe: Recipe, facts: abc.Mapping[str, object], report: Progress) -> None:
    import onnx

    from quantize.onnx_builder import build_model
    from quantize.source import file_sha256
    from quantize.weights_file import FILE_NAME, WeightsFile

    with (folder / FILE_NAME).open("wb") as stream:
        weights = WeightsFile(stream, recipe.bits, recipe.block_size)
        model = build_model(source, recipe, weights, lambda fraction: report("quantizing", 0.9 * fraction))
    report("writing", 0.9)
    onnx.save(model, folder / MODEL)
    if recipe.head is not None:
        np.save(folder / HEAD, recipe.head)
    (folder / TOKENS).write_text(json.dumps(source.tokens), encoding="ascii")
    digests = {path.name: file_sha256(path) for path in sorted(folder.iterdir())}
    manifest = _manifest(source, recipe) | {"sha256": digests}
    if taken := sorted(manifest.keys() & facts.keys()):
        raise ValueError(f"{taken[0]} is the manifest's own")
    text = tomli_w.dumps({**manifest, **facts})
    (folder / MANIFEST).write_text(text, encoding="utf-8")


def _manifest(source: Source, recipe: Recipe) -> dict[str, int | str]:
    from quantize.onnx_builder import num_ctx

    d = source.dimensions
    manifest: dict[str, int | str] = {"format": FORMAT, "kind": "draft", "model": MODEL}
    manifest |= {"architecture": source.architecture.name, "num_layers": len(recipe.layers)}
    manifest |= {"num_kv_heads": d.num_kv_heads, "head_size": d.head_size}
    manifest |= {"num_ctx": num_ctx(d), "num_vocab": d.num_vocab, "num_head_vocab": d.num_vocab}
    if recipe.head is not None:
        manifest |= {"num_head_vocab": len(recipe.head), "d2t": HEAD}
    manifest |= {"tokens": TOKENS, "bits": recipe.bits, "block_size": recipe.block_size}
    if recipe.embedding_bits is not None:
        manifest["embedding_bits"] = recipe.embedding_bits
    manifest |= {"source": source.path.absolute().name, "source_sha256": source.sha256()}
    return manifest | {"edgespec_version": _edgespec_version(), "onnxruntime_version": _onnxruntime_version()}


def _edgespec_version() -> str:
    try:
        return importlib.metadata.version("edgespec")
    except importlib.metadata.PackageNotFoundError:  # run from a source tree
        return "unknown"


def _onnxruntime_version() -> str:
    import onnxruntime

    return str(onnxruntime.__version__)
