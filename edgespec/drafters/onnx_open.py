"""Finding and loading an ONNX decoder of either kind: a folder that ``quantize`` wrote, or a published export."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from edgespec.core.head import Head
from edgespec.drafters import vocabulary
from edgespec.drafters.files import read_text, unreadable
from edgespec.drafters.onnx_fixed import FixedCacheModel
from edgespec.drafters.onnx_growing import GrowingCacheModel
from edgespec.drafters.onnx_manifest import MANIFEST, DraftManifest
from edgespec.drafters.onnx_session import DraftModel, open_session
from edgespec.errors import ModelFormatError, ModelNotFoundError


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """
    path         the .onnx file
    model        its rows; whoever opened it closes it
    head         what the columns of a row stand for, None: each for the id that is its index
    num_vocab    ids it was made for, padding included
    tokens_path  for ``read_tokens``
    """

    path: Path
    model: DraftModel
    head: Head | None
    num_vocab: int
    tokens_path: Path


def open_model(
    path: Path, *, num_ctx: int, num_threads: int, num_slots: int = 1, spin: bool = True, provider: str = "cpu"
) -> OpenedModel:
    """Arguments and errors as for OnnxDrafter.open, which checks the numbers."""
    try:
        model_path, manifest = _locate(path)
    except OSError as error:
        raise unreadable(path, error) from error
    session = open_session(model_path, num_threads, spin, provider)
    if manifest is None:
        growing = GrowingCacheModel(session, num_slots, min(num_ctx, _max_positions(model_path, num_ctx)))
        return OpenedModel(model_path, growing, None, growing.num_logits, model_path)
    d2t = manifest.read_d2t(model_path.parent)
    fixed = FixedCacheModel(session, manifest, num_slots, num_ctx)
    head = None if d2t is None else Head(d2t)
    return OpenedModel(model_path, fixed, head, manifest.num_vocab, model_path.parent / manifest.tokens)


def read_tokens(path: Path) -> tuple[str, ...]:
    """Raw token texts by id, of a token list or of what lies beside an .onnx file.

    Raises VocabularyMismatchError for an export without one, FileAccessError or ModelFormatError.
    """
    return vocabulary.load_tokens(vocabulary.tokenizer_beside(path) if path.suffix == ".onnx" else path)


def _locate(path: Path) -> tuple[Path, DraftManifest | None]:
    """The .onnx file, and the manifest of a folder in edgespec's own form."""
    if path.suffix == ".gguf" and path.is_file():
        raise ModelFormatError(f"{path} is a GGUF; make a draft model of it with: edgespec quantize draft")
    folder = path if path.is_dir() else path.parent
    if path.exists() and (folder / MANIFEST).exists():
        manifest = DraftManifest.read(folder / MANIFEST)
        if path in (folder, folder / manifest.model):
            return folder / manifest.model, manifest
    return (_only_model(path) if path.is_dir() else path), None


def _only_model(folder: Path) -> Path:
    found = sorted(folder.glob("*.onnx")) or sorted(folder.glob("onnx/*.onnx"))
    usual = [path for path in found if path.name == "model.onnx"]
    if not found and (folder / "pair.toml").is_file():
        raise ModelFormatError(f"{folder} is a pair, not a draft model; give it as the pair, or its draft's folder")
    if not found:
        raise ModelNotFoundError(f"{folder} has no .onnx file and no {MANIFEST}; check the path")
    if len(found) > 1 and not usual:
        names = ", ".join(path.name for path in found)
        raise ModelFormatError(f"{folder} has several models: {names}; give the path of one of them")
    return (usual or found)[0]


def _max_positions(model: Path, default: int) -> int:
    """Most tokens a published export's positions reach, by the config.json beside it or one folder up."""
    for path in (model.parent / "config.json", model.parent.parent / "config.json"):
        if path.exists():
            return _read_max_positions(path, default)
    return default


def _read_max_positions(path: Path, default: int) -> int:
    content = read_text(path)
    try:
        config = json.loads(content)
        found = config.get("max_position_embeddings") or config.get("n_positions") or default
        return max(1, int(found))
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ModelFormatError(f"{path} is not a model's config.json ({error}); get or remove it") from error
