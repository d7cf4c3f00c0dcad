"""``edgespec run -i``: a conversation in the terminal."""

from __future__ import annotations

import collections.abc as abc
import sys
from contextlib import suppress

import click

from edgespec.cli import report
from edgespec.core.sequence import SamplingParams
from edgespec.errors import PromptError
from edgespec.runtime import Runtime
from edgespec.text.chat import Message

HELP = "Ctrl-C stops an answer, Ctrl-D or /exit ends the chat, /clear forgets the conversation."


def chat(runtime: Runtime, params: SamplingParams, system: str | None, first: str | None) -> None:
    """Read a line, answer it, remember both; until the input ends.

    A turn that does not fit the context is refused with one line and forgotten; the conversation goes on.
    """
    if _at_terminal():
        click.echo(HELP, err=True)
    history = begin = [Message("system", system)] if system else []
    for line in _lines(first):
        if line == "/exit":
            return
        if line == "/clear":
            history = begin
            continue
        turn = [*history, Message("user", line)]
        try:
            history = [*turn, Message("assistant", _answer(runtime, params, turn))]
        except PromptError as error:
            click.echo(f"Error: {error} (/clear starts anew)", err=True)


def _answer(runtime: Runtime, params: SamplingParams, turn: list[Message]) -> str:
    result = report.collect(runtime.stream(turn, params), report.show)
    report.answer(runtime, result, as_json=False)
    return result.text


def _lines(first: str | None) -> abc.Iterator[str]:
    """The user's turns: ``first``, then what is typed or piped; empty lines are skipped."""
    if first:
        yield first
    if sys.stdin is None:
        return
    if _at_terminal():
        with suppress(ImportError):
            import readline  # noqa: F401  (gives input() a history and editing keys)
    while True:
        try:
            line = _ask().strip()
        except (EOFError, KeyboardInterrupt):
            click.echo(err=True)
            return
        except UnicodeDecodeError as error:
            raise PromptError(f"standard input is not UTF-8 text ({error.reason}); convert it first") from None
        if line:
            yield line


def _ask() -> str:
    """One line; the prompt goes where it is no part of an answer."""
    if not _at_terminal():
        return input()
    if sys.stdout.isatty():
        return input("> ")
    click.echo("> ", nl=False, err=True)
    return input()


def _at_terminal() -> bool:
    return sys.stdin is not None and sys.stdin.isatty()
