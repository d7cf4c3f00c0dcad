"""``draft.toml``: what lies in a folder that ``quantize`` wrote."""

from __future__ import annotations

import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.drafters.files import read_text, unreadable
from edgespec.errors import ModelFormatError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

MANIFEST = "draft.toml"
FORMAT = 1


@dataclass(frozen=True, slots=True)
class DraftManifest:
    """The keys the runtime reads; a manifest may hold more.

    num_vocab, num_head_vocab  token ids the model can read, and logits it gives
    num_ctx                    most tokens its positions reach
    d2t                        .npy file with the verifier id of each logit; "" where that is the logit's index
    tokens, model              the token list (JSON) and the graph, file names in the same folder
    """

    num_layers: int
    num_kv_heads: int
    head_size: int
    num_vocab: int
    num_head_vocab: int
    num_ctx: int
    d2t: str = ""
    tokens: str = "tokens.json"
    model: str = "model.onnx"

    @classmethod
    def read(cls, path: Path) -> DraftManifest:
        """Raises FileAccessError, and ModelFormatError for another version or a value that is missing or wrong."""
        content = _read_toml(path)
        if content.get("format") != FORMAT:
            raise ModelFormatError(
                f"{path} has format {content.get('format')!r}; allowed: {FORMAT}; build the draft model again"
            )
        known = {field.name: field.type for field in fields(cls)}
        values = {name: _checked(path, name, content[name], known[name]) for name in known if name in content}
        try:
            return cls(**values)
        except TypeError as error:
            missing = ", ".join(name for name in known if name not in values and name not in ("d2t", "tokens", "model"))
            raise ModelFormatError(f"{path} lacks {missing}; build the draft model again") from error

    def read_d2t(self, folder: Path) -> NDArray[np.int64] | None:
        """The verifier id of each logit; None where that is the logit's index. Checked against the sizes."""
        if not self.d2t:
            if self.num_head_vocab != self.num_vocab:
                raise ModelFormatError(
                    f"{folder / MANIFEST} names {self.num_head_vocab} logits for {self.num_vocab} tokens and no d2t; "
                    "build the draft model again"
                )
            return None
        path = folder / self.d2t
        try:
            with path.open("rb") as stream:
                d2t = np.lib.format.read_array(stream, allow_pickle=False)
        except OSError as error:
            raise unreadable(path, error) from error
        except ValueError as error:
            raise ModelFormatError(f"{path} is not a .npy array; build the draft model again") from error
        return self._checked_d2t(path, d2t)

    def _checked_d2t(self, path: Path, d2t: Any) -> NDArray[np.int64]:
        if not isinstance(d2t, np.ndarray) or d2t.shape != (self.num_head_vocab,) or d2t.dtype.kind not in "iu":
            shape = getattr(d2t, "shape", "no shape")
            raise ModelFormatError(
                f"{path} has shape {shape}; allowed: {self.num_head_vocab} whole numbers; build the draft model again"
            )
        if d2t.min() < 0 or d2t.max() >= self.num_vocab:
            raise ModelFormatError(
                f"{path} maps to ids from {d2t.min()} to {d2t.max()}; allowed: 0 to {self.num_vocab - 1}; "
                "build the draft model again"
            )
        return d2t.astype(np.int64)


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(read_text(path))
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ModelFormatError(f"{path} is not TOML ({error}); build the draft model again") from error


def _checked(path: Path, name: str, value: Any, kind: Any) -> Any:
    if kind == "int" and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ModelFormatError(f"{path}: {name} is {value!r}; allowed: a whole number of 1 or more; build it again")
    if kind == "str" and (not isinstance(value, str) or Path(value).name != value):
        raise ModelFormatError(f"{path}: {name} is {value!r}; allowed: a file name in the same folder; build it again")
    return value
