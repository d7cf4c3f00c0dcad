"""What a distillation is told, what of it its folder remembers, and what a later sitting may change."""

from __future__ import annotations

import collections.abc as abc
import json
import math
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from edgespec.errors import FileAccessError, ModelFormatError, ParameterError
from quantize.folder import new_file

WORK, SETTINGS = "work", "settings.json"
FORMAT = 1
GROW = ("tokens", "hours", "epochs")  # what a later sitting may have more of
_BOUNDS = ("hours", "epochs")  # of a training: none is more than any
DEVICES = ("cpu", "cuda")
BLOCK_SIZES = (32, 64, 128)

_FREE = ("verifier", "prompts", "threads")  # what may differ, as long as the files are the same
_COUNTS = ("tokens", "batch_size", "max_length", "num_rows", "threads")
_MOST: dict[str, int] = {
    **dict.fromkeys((*_COUNTS, "head_vocab"), 10**15),  # far beyond any box, and still exact as a float
    "epochs": 1000,
    "seed": 2**62 - 2,  # what is measured on has the next one, and measuring takes none above
}
_USUAL_HOURS, _USUAL_TOKENS, _USUAL_EPOCHS = 1.0, 2_000_000, 4.0


@dataclass(frozen=True, slots=True)
class DistillSettings:
    """
    verifier       the GGUF that writes the text and is learned from
    out            the folder for all that is made
    layers         which of the verifier's layers the student begins with, or how many: then half of them are its first
                   and the others its last ones
    head_vocab     ids the draft may propose, the most frequent of the text; 0: all
    prompts        a .jsonl file of prompts to answer (see FilePrompts); None: the verifier writes its own
    tokens         that the verifier writes; None: as many as their share of the hours allows
    hours          of everything, over all sittings; None: until tokens and epochs are done
    epochs         how often the text is read; None: as often as the hours allow
    batch_size     texts of max_length tokens in a training step; of shorter ones as many more
    learning_rate  the highest
    max_length     tokens of a text
    hidden_weight  how much the student's last hidden states are to be like the verifier's, against the divergence
    block_size     inputs that share a scale in the drafts: with more, scales take less space
    num_rows       texts written at once; None: by the size of the verifier
    seed           of text and order
    device         "cpu" or "cuda"
    threads        None: the usable CPUs
    resume         go on where an earlier sitting stopped
    force          remove what an earlier one made
    """

    verifier: Path
    out: Path
    layers: int | tuple[int, ...] = 4
    head_vocab: int = 8192
    prompts: Path | None = None
    tokens: int | None = None
    hours: float | None = None
    epochs: float | None = None
    batch_size: int = 2
    learning_rate: float = 1e-3
    max_length: int = 896
    hidden_weight: float = 0.0
    block_size: int = 32
    num_rows: int | None = None
    seed: int = 0
    device: str = "cpu"
    threads: int | None = None
    resume: bool = False
    force: bool = False

    def __post_init__(self) -> None:
        """Raises ParameterError."""
        for name in _COUNTS:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ParameterError(f"{name}: got {value}; allowed: 1 or more")
        for name in ("hours", "epochs", "learning_rate"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ParameterError(f"{name}: got {value}; allowed: a number above 0")
        for name in ("head_vocab", "hidden_weight", "seed"):
            if not 0 <= (value := getattr(self, name)) < math.inf:
                raise ParameterError(f"{name}: got {value}; allowed: 0 or more")
        _check_most(self)
        if self.device not in DEVICES:
            raise ParameterError(f"device: got {self.device!r}; allowed: {', '.join(DEVICES)}")
        if self.block_size not in BLOCK_SIZES:
            allowed = ", ".join(map(str, BLOCK_SIZES))
            raise ParameterError(f"block_size: got {self.block_size}; allowed: {allowed}")
        if self.resume and self.force:
            raise ParameterError("resume and force: got both; allowed: one, since force begins anew")

    @property
    def work(self) -> Path:
        return self.out / WORK

    def bounded(self) -> DistillSettings:
        """With bounds where none were given."""
        if self.hours is not None:
            return self
        if self.tokens is None and self.epochs is None:
            return replace(self, hours=_USUAL_HOURS)
        return replace(self, tokens=self.tokens or _USUAL_TOKENS, epochs=self.epochs or _USUAL_EPOCHS)

    def kept_layers(self, num_layers: int) -> tuple[int, ...]:
        """Which of the verifier's. Raises ParameterError."""
        if not isinstance(self.layers, int):
            if not self.layers or not {*self.layers} <= {*range(num_layers)} or len({*self.layers}) < len(self.layers):
                raise ParameterError(
                    f"layers: got {list(self.layers)}; allowed: one or more of 0 to {num_layers - 1}, each once"
                )
            return self.layers
        if not 0 < self.layers <= num_layers:
            raise ParameterError(f"layers: got {self.layers} of them; allowed: 1 to {num_layers}, or their numbers")
        num_first = -(-self.layers // 2)
        return *range(num_first), *range(num_layers - self.layers + num_first, num_layers)

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON; without what belongs to one sitting only."""
        content = {name: value for name, value in asdict(self).items() if name not in ("out", "resume", "force")}
        return {name: _plain(value) for name, value in content.items()}


def _check_most(settings: DistillSettings) -> None:
    for name, most in _MOST.items():
        if (value := getattr(settings, name) or 0) > most:
            raise ParameterError(f"{name}: got {_short(value)}; allowed: at most {most}")


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value.absolute())
    return list(value) if isinstance(value, tuple) else value


def saved_settings(out: Path, given: abc.Mapping[str, Any]) -> DistillSettings:
    """Those of an earlier sitting in ``out``, and what is ``given`` instead. Raises FileAccessError when there was no
    such sitting, ModelFormatError when what it left is damaged, ParameterError."""
    saved = _read(out / WORK / SETTINGS)
    try:
        values = {field.name: saved[field.name] for field in fields(DistillSettings) if field.name in saved}
        values["verifier"] = Path(saved["verifier"])
        values["prompts"] = None if saved["prompts"] is None else Path(saved["prompts"])
        if isinstance(values.get("layers"), list):
            values["layers"] = tuple(values["layers"])
        begun = DistillSettings(**{**values, "out": out, "resume": True})
    except (KeyError, TypeError, ParameterError) as error:  # nobody gave these
        raise _damaged(out / WORK / SETTINGS) from error
    return replace(begun, **given)


def has_settings(out: Path) -> bool:
    return (out / WORK / SETTINGS).is_file()


def is_ours(out: Path) -> bool:
    """Whether those that are there are of a distillation, and whole."""
    try:
        return "verifier_sha256" in _read(out / WORK / SETTINGS)
    except (FileAccessError, ModelFormatError):
        return False


def settle(settings: DistillSettings, digests: abc.Mapping[str, str]) -> None:
    """Write the settings into the work folder, and compare them with those that are there.

    digests  of the files they name
    Raises ParameterError naming what differs, and FileAccessError.
    """
    path = settings.work / SETTINGS
    content = {"format": FORMAT, **settings.as_dict(), **digests}
    if path.is_file():
        _compare(_read(path), content)
    with new_file(path, force=True) as made:
        made.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _compare(old: abc.Mapping[str, Any], new: abc.Mapping[str, Any]) -> None:
    for name in new:
        before, value = old.get(name), new[name]
        if name in _FREE or value == before:
            continue
        if name not in GROW:
            raise ParameterError(
                f"{name}: got {_short(value)}, this was begun with {_short(before)}; keep it, or begin anew (--force)"
            )
        if before is not None and (value is None or value < before):
            raise ParameterError(f"{name}: got {value}, this was begun with {before}; allowed: the same or more")
        if before is None and name in _BOUNDS:
            raise ParameterError(
                f"{name}: got {value}, this was begun without, which is more; leave it out, or begin anew (--force)"
            )


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 40 else f"{text[:12]}…"


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            raise ValueError(content["format"])
    except OSError as error:
        raise FileAccessError(
            f"{path} cannot be read: {error.strerror or error}; nothing to go on with, so begin anew"
        ) from error
    except (ValueError, TypeError, KeyError) as error:
        raise _damaged(path) from error
    return dict(content)


def _damaged(path: Path) -> ModelFormatError:
    return ModelFormatError(f"{path} is damaged; begin anew with --force")
