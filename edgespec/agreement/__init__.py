"""How well one model stands for another: both read the same text, and their rows are compared position by position."""

from __future__ import annotations

from edgespec.agreement.comparison import compare
from edgespec.agreement.result import Agreement, Scores

__all__ = ["Agreement", "Scores", "compare"]
