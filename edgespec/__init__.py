"""edgespec: speculative decoding on one box.

with edgespec.load() as runtime:
    for chunk in runtime.stream("Why is the sky blue?"):
        print(chunk.text, end="", flush=True)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edgespec.core.policy import Fixed
    from edgespec.core.sequence import SamplingParams
    from edgespec.engine.stats import Stats
    from edgespec.loading import load
    from edgespec.runtime import Chunk, Result, Runtime
    from edgespec.text.chat import Message

__all__ = ["Chunk", "Fixed", "Message", "Result", "Runtime", "SamplingParams", "Stats", "load"]

_HOME = {
    "Chunk": "edgespec.runtime",
    "Fixed": "edgespec.core.policy",
    "Message": "edgespec.text.chat",
    "Result": "edgespec.runtime",
    "Runtime": "edgespec.runtime",
    "SamplingParams": "edgespec.core.sequence",
    "Stats": "edgespec.engine.stats",
    "load": "edgespec.loading",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: ``import edgespec`` alone loads no backend."""
    if name not in _HOME:
        raise AttributeError(f"module 'edgespec' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
