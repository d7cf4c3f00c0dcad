"""What a distillation made."""

from __future__ import annotations

import collections.abc as abc
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantize.distill.history import History


@dataclass(frozen=True, slots=True)
class DistillResult:
    """
    out, verifier  folders and files as the settings have them
    drafts         draft folders by their weights ("int8", "int4")
    history        of the training
    settings       what it was told, bounds filled in, and what came of it: layers, text by task, seconds, digests;
                   ready for JSON
    checkpoint     sha256 of the trained state the drafts were made of
    """

    out: Path
    verifier: Path
    drafts: abc.Mapping[str, Path]
    history: History
    settings: abc.Mapping[str, Any]
    checkpoint: str
