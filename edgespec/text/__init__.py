"""Text in and out: tokenizer, chat templates, visible output."""

from __future__ import annotations

from edgespec.text.chat import ChatTemplate, Message
from edgespec.text.output import OutputText, Text
from edgespec.text.tokenizer import Tokenizer

__all__ = ["ChatTemplate", "Message", "OutputText", "Text", "Tokenizer"]
