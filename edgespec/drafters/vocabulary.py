"""Whether a draft model speaks the verifier's tokens, and where its token list is found."""

from __future__ import annotations

import collections.abc as abc
import json
import re
from pathlib import Path
from typing import Any

from edgespec.drafters.files import read_text
from edgespec.errors import ModelFormatError, VocabularyMismatchError

MAX_TOKENS = 2**22

_WORDS = "pad|unused|reserved|dummy|extra|placeholder"
_PADDING = re.compile(rf"\[(?:{_WORDS})[-_]?\d*\]|<\|?(?:{_WORDS})[a-z_-]*\d*\|?>", re.IGNORECASE)


def is_padding(text: str) -> bool:
    """Whether a token is a place holder that no text ever contains: "", "[PAD123]", "<unused7>", "<|reserved_3|>"."""
    return not text or _PADDING.fullmatch(text) is not None


def check(draft_tokens: abc.Sequence[str], verifier_tokens: abc.Sequence[str]) -> None:
    """Raise VocabularyMismatchError unless every real token of the draft model is the verifier's token of the same id.

    Both are raw vocabulary texts by id ("Ġthe", "▁the", "<|im_end|>"). Padding of the draft is never looked at. Tokens
    that only the verifier has do no harm: the draft model never proposes them, and proposes nothing where the prompt
    holds one that it cannot read.
    """
    if all(map(is_padding, draft_tokens)):
        raise VocabularyMismatchError(
            f"the draft model's list of {len(draft_tokens)} tokens has no real one; get its tokenizer.json again"
        )
    for token, text in enumerate(draft_tokens):
        theirs = verifier_tokens[token] if token < len(verifier_tokens) else ""
        if text != theirs and not is_padding(text) and _plain(text) != _plain(theirs):
            raise VocabularyMismatchError(_difference(token, text, theirs, len(draft_tokens), len(verifier_tokens)))


def _plain(text: str) -> str:
    """GGUF converters write the spaces of user-defined tokens plainly where SentencePiece lists have U+2581."""
    return text.replace("\u2581", " ")


def _difference(token: int, ours: str, theirs: str, num_ours: int, num_theirs: int) -> str:
    verifier = f"{_short(theirs)} in the verifier's" if token < num_theirs else "missing in the verifier's"
    return (
        f"the draft model has another vocabulary than the verifier: token {token} is {_short(ours)} in the draft's "
        f"list of {num_ours} and {verifier} list of {num_theirs}; use a draft model made for this verifier, or lookup"
    )


def _short(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:40] + "…")


def load_tokens(path: Path) -> tuple[str, ...]:
    """Token texts by id from a JSON list, or from a Hugging Face ``tokenizer.json``; ids that are not named are "".

    Raises ModelNotFoundError or FileAccessError when it cannot be read, ModelFormatError when it is neither of the two.
    """
    content = read_text(path)
    try:
        pairs = _pairs(json.loads(content))
        size = max((token for token, _ in pairs), default=-1) + 1
        if not 0 < size <= MAX_TOKENS or any(token < 0 for token, _ in pairs):
            raise ValueError(f"ids up to {size - 1}")
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        raise ModelFormatError(
            f"{path} is no token list ({type(error).__name__}: {error}); expected a JSON list of texts or a Hugging "
            "Face tokenizer.json; get the draft model again"
        ) from error
    texts = [""] * size
    for token, text in pairs:
        texts[token] = text
    return tuple(texts)


def _pairs(content: Any) -> list[tuple[int, str]]:
    """(id, text) of a list, or of a tokenizer's model vocabulary and then its added tokens, which win."""
    if isinstance(content, list):
        return [(token, _text(text)) for token, text in enumerate(content)]
    vocab = content["model"]["vocab"]
    if isinstance(vocab, dict):
        pairs = [(int(token), _text(text)) for text, token in vocab.items()]
    else:  # Unigram: pairs of piece and score
        pairs = [(token, _text(piece)) for token, (piece, _) in enumerate(vocab)]
    return pairs + [(int(added["id"]), _text(added["content"])) for added in content.get("added_tokens") or ()]


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"a token that is {value!r}")
    return value


def tokenizer_beside(model: Path) -> Path:
    """The ``tokenizer.json`` of a published export: beside the .onnx file, or one folder up.

    Raises VocabularyMismatchError when there is none: without a token list nothing shows that a draft model fits.
    """
    for folder in (model.parent, model.parent.parent):
        if (folder / "tokenizer.json").exists():
            return folder / "tokenizer.json"
    raise VocabularyMismatchError(
        f"{model} comes without a token list, so nothing shows that it speaks the verifier's tokens; "
        f"put the model's tokenizer.json into {model.parent}"
    )
