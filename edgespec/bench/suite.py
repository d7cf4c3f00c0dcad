"""The prompts a pair is measured on: a file's, or the few that come with edgespec."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from edgespec.errors import FileAccessError, PromptError

BUILT_IN = Path(__file__).with_name("suite.jsonl")


class Question(NamedTuple):
    category: str
    prompt: str


def read_suite(path: Path | None = None, every: int = 1) -> list[Question]:
    """Every ``every``-th line's first turn: {"category": "...", "turns": ["...", ...]} a line, as Spec-Bench has it.

    None is the built-in suite. Raises FileAccessError or PromptError.
    """
    path = path or BUILT_IN
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # JSON may hold other breaks, as U+2028
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise FileAccessError(f"cannot read {path}: {reason}; give a .jsonl file in UTF-8") from None
    questions = [_question(line, f"{path} line {number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not questions:
        raise PromptError(f"{path} has no prompts; give a line of JSON for each")
    return questions[::every]


def _question(line: str, where: str) -> Question:
    try:
        content: Any = json.loads(line)
        question = Question(content["category"], content["turns"][0])
        "".join(question).encode("utf-8")  # lone surrogates, which JSON can spell, are no text
    except (ValueError, TypeError, KeyError, IndexError, RecursionError):
        question = Question("", "")
    if not isinstance(question.category, str) or not isinstance(question.prompt, str) or not question.prompt.strip():
        raise PromptError(f'{where}: got {line[:60]!r}; allowed: {{"category": "...", "turns": ["..."]}}')
    return question
