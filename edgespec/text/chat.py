"""Chat templates: a conversation rendered to the text a model was trained on, by the Jinja template in its GGUF.

The template runs as in Hugging Face's ``apply_chat_template`` (same Jinja settings, extensions and globals), and in a
sandbox, since it comes from a downloaded file.

The rendered text is read with special tokens parsed, here as everywhere else (llama.cpp, Hugging Face): a message that
spells ``<|im_end|>`` ends its own turn. Whoever passes on text of strangers must take such spellings out first.
"""

from __future__ import annotations

import collections.abc as abc
import json
from dataclasses import asdict, dataclass
from datetime import datetime
from functools import cached_property
from typing import Any, NoReturn

from jinja2 import Template, TemplateError
from jinja2.ext import Extension
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from edgespec.errors import PromptError


@dataclass(frozen=True, slots=True)
class Message:
    """One turn. Which roles there are, and in which order, the template decides: system, user, assistant as a rule."""

    role: str
    content: str

    def __post_init__(self) -> None:
        """Raises PromptError for a role that is not a name or content that is not text."""
        if not isinstance(self.role, str) or not self.role:
            raise PromptError(f"message role: got {self.role!r}; give a text such as 'user'")
        if not isinstance(self.content, str):
            raise PromptError(f"message content: got {type(self.content).__name__}; only text is supported")


class ChatTemplate:
    """A model's chat template, compiled at the first use and kept. Any thread may call it.

    source    Jinja text, None where the model has none
    bos, eos  spellings of the tokens that begin and end a sequence
    """

    def __init__(self, source: str | None, *, bos: str = "", eos: str = "") -> None:
        self._source = source
        self._tokens = {"bos_token": bos, "eos_token": eos}

    def render(
        self, messages: abc.Sequence[Message | abc.Mapping[str, str]], *, add_generation_prompt: bool = True
    ) -> str:
        """The conversation as text, ready for ``Tokenizer.encode_chat``.

        messages               Message or {"role": ..., "content": ...}, one at least
        add_generation_prompt  open the assistant's turn at the end
        Raises PromptError for a malformed message, for a conversation the template refuses, and without a template.
        """
        turns = [asdict(_message(message)) for message in messages]
        if not turns:
            raise PromptError("the conversation is empty: got 0 messages; give at least one")
        variables: dict[str, Any] = {"messages": turns, "add_generation_prompt": add_generation_prompt, **self._tokens}
        try:
            # Templates ask whether tools "is none", which an undefined variable is not.
            return self._template.render(variables, tools=None, documents=None)
        except PromptError:
            raise
        except Exception as error:  # a template runs as Python and can fail in any way
            raise PromptError(f"the model's chat template refuses the conversation: {_line(error)}") from error

    @cached_property
    def _template(self) -> Template:
        if self._source is None:
            raise PromptError("the model has no chat template: pass plain text with --raw, or use an instruct model")
        try:
            return _environment().from_string(self._source)
        except TemplateError as error:
            raise PromptError(
                f"the model's chat template is not valid Jinja: {_line(error)}; pass plain text with --raw"
            ) from error


class _GenerationTag(Extension):
    """``{% generation %}`` marks what a trainer learns from; for rendering it is transparent."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it as an instance attribute)

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML, which no model was trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _message(message: Message | abc.Mapping[str, str]) -> Message:
    if isinstance(message, Message):
        return message
    if not isinstance(message, abc.Mapping):
        raise PromptError(f"message: got {type(message).__name__}; give {{'role': ..., 'content': ...}}")
    if set(message) != {"role", "content"}:
        keys = ", ".join(sorted(map(str, message))) or "none"
        raise PromptError(f"message keys: got {keys}; allowed: exactly role and content")
    return Message(message["role"], message["content"])


def _line(error: Exception) -> str:
    """The error on one line."""
    return " ".join(str(error).split()) or type(error).__name__
