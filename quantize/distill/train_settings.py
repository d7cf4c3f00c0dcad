"""How to train: what a checkpoint remembers, and what a longer training may change."""

from __future__ import annotations

import collections.abc as abc
from dataclasses import asdict, dataclass
from typing import Any

from edgespec.errors import ParameterError

GROW = ("epochs", "hours")  # what may be more when a training goes on
_FREE = ("save_every_s",)  # what changes nothing of the result
_ROUND_TO = 4


@dataclass(frozen=True, slots=True)
class TrainSettings:
    """
    epochs         how often every text is read; None: as often as the hours allow
    hours          of training, over all sittings; None: until the epochs are done. One of both is given
    batch_size     texts of max_length tokens in a batch; of shorter ones as many more as have as many tokens
    max_length     tokens of a text; of a longer one the end is taken
    learning_rate  the highest
    warm_up        steps until it is reached, at most a tenth of the epochs'
    prompt_share   of the positions where the next token was given that are learned from, beside all where the model
                   wrote it
    hidden_weight  of 1 - cosine between last hidden states, against the divergence in nats
    round_to       4: once the learning rate decays, the student learns, and is looked at, with its matrices rounded to
                   4 bits in blocks of block_size, as a draft will have them; None: never
    save_every_s   seconds between checkpoints
    eval_every     steps between looks at held-out texts, eval_tokens positions of them
    """

    epochs: float | None = None
    hours: float | None = None
    batch_size: int = 12
    max_length: int = 448
    learning_rate: float = 1e-3
    warm_up: int = 100
    prompt_share: float = 0.3
    hidden_weight: float = 0.0
    round_to: int | None = None
    block_size: int = 32
    seed: int = 0
    save_every_s: float = 60.0
    eval_every: int = 100
    eval_tokens: int = 10_000

    def __post_init__(self) -> None:
        if self.epochs is None and self.hours is None:
            raise ParameterError(
                "epochs and hours: got neither; allowed: either or both, since one must end the training"
            )
        sizes = ("batch_size", "max_length", "block_size", "eval_every", "eval_tokens")
        for name in ("epochs", "hours", "learning_rate", *sizes):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ParameterError(f"{name}: got {value}; allowed: above 0")
        if self.round_to not in (None, _ROUND_TO):
            raise ParameterError(f"round_to: got {self.round_to}; allowed: {_ROUND_TO}, or none")
        if not 0 <= self.prompt_share <= 1:
            raise ParameterError(f"prompt_share: got {self.prompt_share}; allowed: 0 to 1")

    def check_resumes(self, old: abc.Mapping[str, Any]) -> bool:
        """Whether this is more of the same training. Raises ParameterError for another one, naming the difference."""
        grown = False
        for name, value in asdict(self).items():
            before = old.get(name)
            if value == before or name in _FREE:
                continue
            if name not in GROW or not _is_more(value, before):
                more = ", or more of it" if name in GROW else ""
                raise ParameterError(
                    f"{name}: got {value}, the training began with {before}; keep it{more}, or train anew (--force)"
                )
            grown = True
        return grown


def _is_more(value: float | None, before: float | None) -> bool:
    return value is None or (before is not None and value > before)
