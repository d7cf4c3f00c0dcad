"""The text that tells, before the first request, how drafts are received."""

from __future__ import annotations

from typing import cast

import pytest

from edgespec.calibration.usual import QUESTIONS, usual
from edgespec.errors import PromptError
from edgespec.opening import usual_text
from edgespec.text.tokenizer import Tokenizer
from tests.fakes import FakeTokenizer


class ByteTokenizer(FakeTokenizer):
    def encode(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        return list(text.encode())


def test_the_questions_come_in_the_models_own_chat_template() -> None:
    tokenizer = ByteTokenizer()
    tokenizer.chat_template = "<{{ messages[0].content }}>"
    prompts, end_tokens = usual(cast(Tokenizer, tokenizer))
    assert len({tuple(prompt) for prompt in prompts}) == len(QUESTIONS)
    assert prompts[0] == tokenizer.encode_chat(f"<{QUESTIONS[0]}>")
    assert end_tokens == tokenizer.end_tokens


def test_a_template_that_cannot_be_used_is_left_to_whoever_asks_something() -> None:
    tokenizer = FakeTokenizer()
    tokenizer.chat_template = "{% broken"
    with pytest.raises(PromptError):
        usual(cast(Tokenizer, tokenizer))
    assert usual_text(cast(Tokenizer, tokenizer)) is None
