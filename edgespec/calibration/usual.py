"""What people usually ask, so that it is known before the first request how a draft model's drafts are received."""

from __future__ import annotations

import collections.abc as abc
from typing import NamedTuple

from edgespec.text.chat import ChatTemplate, Message
from edgespec.text.tokenizer import Tokenizer

# Answers to these go on for a while, and are of different kinds. The quick calibration hardly gets beyond the first.
QUESTIONS = (
    "Explain how rainbows form, step by step.",
    "Write a short story about a lighthouse keeper who finds a letter.",
    "A baker sells 12 loaves at 3 dollars each and 20 rolls at 50 cents each. How much does she earn? Show the steps.",
    "Write a Python function that counts the words in a text file, and explain it.",
)


class Usual(NamedTuple):
    """
    prompts     token ids of each
    end_tokens  that end an answer
    """

    prompts: tuple[abc.Sequence[int], ...] = ()
    end_tokens: frozenset[int] = frozenset()


def usual(tokenizer: Tokenizer) -> Usual:
    """The questions, by the model's own chat template. Raises PromptError for one that cannot be used."""
    template = ChatTemplate(tokenizer.chat_template, bos=tokenizer.bos, eos=tokenizer.eos)
    prompts = (tokenizer.encode_chat(template.render([Message("user", question)])) for question in QUESTIONS)
    return Usual(tuple(prompts), tokenizer.end_tokens)
