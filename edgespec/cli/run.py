"""``edgespec run``: one prompt in, the verifier's answer out."""

from __future__ import annotations

import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import click

from edgespec.cli import report
from edgespec.cli.chat import chat
from edgespec.core.policy import DEFAULT_POLICY, Fixed
from edgespec.core.sequence import RULES, SamplingParams
from edgespec.errors import FileAccessError, PromptError
from edgespec.loading import load
from edgespec.runtime import MODES, Mode, Runtime
from edgespec.text.chat import Message

DEFAULT = SamplingParams()


@click.command()
@click.argument("prompt", required=False)
@click.option("--file", "file", type=click.Path(path_type=Path), help="Read the prompt (or what follows PROMPT) here.")
@click.option("-i", "--interactive", is_flag=True, help="Chat in the terminal; PROMPT is the first turn.")
@click.option("--pair", metavar="NAME", help="A verifier and its draft model by name.  [default: starter]")
@click.option("--verifier", metavar="GGUF", type=click.Path(path_type=Path), help="A verifier of your own.")
@click.option("--draft", metavar="ONNX|lookup|none", help="A draft model of your own, prompt lookup, or nothing.")
@click.option("--context", metavar="N", type=int, help="Most tokens of prompt and answer.  [default: at most 4096]")
@click.option("--threads", metavar="N", type=int, help="Threads of either side.  [default: the usable CPUs]")
@click.option("--max-tokens", type=int, default=DEFAULT.max_tokens, show_default=True)
@click.option(
    "--temperature", type=float, default=DEFAULT.temperature, show_default=True, help="0 takes the likeliest."
)
@click.option("--top-k", type=int, default=DEFAULT.top_k, show_default=True, help="0 is off.")
@click.option("--top-p", type=float, default=DEFAULT.top_p, show_default=True, help="1 is off.")
@click.option("--min-p", type=float, default=DEFAULT.min_p, show_default=True, help="0 is off.")
@click.option("--repeat-penalty", type=float, default=DEFAULT.repeat_penalty, show_default=True, help="1 is off.")
@click.option("--seed", type=int, help="The same seed gives the same answer.  [default: random]")
@click.option("--stop", multiple=True, metavar="TEXT", help="End the answer before TEXT (repeatable).")
@click.option("--system", metavar="TEXT", help="System message.")
@click.option("--raw", is_flag=True, help="Continue PROMPT as it is, without the chat template.")
@click.option(
    "--rule", type=click.Choice(RULES), default=DEFAULT.rule, show_default=True, help="How drafts are judged."
)
@click.option("--mode", type=click.Choice(MODES), help="plain: the verifier alone.  [default: sequential]")
@click.option("--draft-length", type=int, default=DEFAULT_POLICY.length, show_default=True, help="Tokens a draft.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the text.")
@click.option("--check-lossless", is_flag=True, help="Compare the answer with plain decoding, token by token.")
def run(prompt: str | None, **options: Any) -> None:
    """Answer PROMPT (or standard input, or --file).

    The answer goes to standard output as it is made; a summary goes to standard error.
    """
    _check_flags(options)
    params = _params(options)
    text = None if options["interactive"] and not (prompt or options["file"]) else _read_prompt(prompt, options["file"])
    with _load(options) as runtime:
        if options["interactive"]:
            chat(runtime, params, options["system"], text)
        else:
            assert text is not None
            _answer(runtime, params, text, options)


def _answer(runtime: Runtime, params: SamplingParams, text: str, options: dict[str, Any]) -> None:
    prompt = text if options["raw"] else messages(options["system"], text)
    if options["check_lossless"]:
        result = runtime.generate(prompt, params, raw=options["raw"], check_lossless=True)
        report.answer(runtime, result, as_json=options["as_json"])
        report.check(result.divergences or ())
        return
    show = None if options["as_json"] else report.show
    with closing(runtime.stream(prompt, params, raw=options["raw"])) as chunks:
        result = report.collect(chunks, show)
    report.answer(runtime, result, as_json=options["as_json"], shown=show is not None)
    if result.finish_reason == "cancelled":
        raise KeyboardInterrupt


def messages(system: str | None, user: str) -> list[Message]:
    return [*([Message("system", system)] if system else []), Message("user", user)]


def _params(options: dict[str, Any]) -> SamplingParams:
    return SamplingParams(
        max_tokens=options["max_tokens"],
        temperature=options["temperature"],
        top_k=options["top_k"],
        top_p=options["top_p"],
        min_p=options["min_p"],
        repeat_penalty=options["repeat_penalty"],
        seed=options["seed"],
        stop=options["stop"],
        rule=options["rule"],
    )


def _load(options: dict[str, Any]) -> Runtime:
    mode: Mode = options["mode"] or ("plain" if options["draft"] == "none" else "sequential")
    return load(
        options["pair"],
        options["verifier"],
        # Plain decoding needs no draft model: do not build or load one.
        "none" if mode == "plain" else options["draft"],
        num_ctx=options["context"],
        num_threads=options["threads"],
        mode=mode,
        policy=Fixed(options["draft_length"]),
        progress=report.progress,
    )


def _check_flags(options: dict[str, Any]) -> None:
    """Combinations that contradict each other."""
    if options["interactive"] and (options["raw"] or options["as_json"] or options["check_lossless"]):
        raise click.UsageError("-i is a chat: it does not go with --raw, --json or --check-lossless")
    if options["raw"] and options["system"]:
        raise click.UsageError("--raw passes the prompt as it is: it does not go with --system")
    if options["mode"] not in (None, "plain") and options["draft"] == "none":
        raise click.UsageError(f"--mode {options['mode']} needs a draft: it does not go with --draft none")


def _read_prompt(prompt: str | None, file: Path | None) -> str:
    """PROMPT, the file, both (PROMPT first), or standard input; PromptError for nothing."""
    parts = [prompt] if prompt is not None else []
    if file is not None:
        parts.append(_read_file(file))
    if not parts:
        if sys.stdin.isatty():
            raise PromptError("no prompt: give one as an argument, with --file, or on standard input; -i starts a chat")
        parts.append(_decode(sys.stdin.buffer.read(), "standard input"))
    text = "\n\n".join(part for part in parts if part)
    if not text.strip():
        raise PromptError("the prompt is empty; give some text")
    return text


def _read_file(file: Path) -> str:
    try:
        return _decode(file.read_bytes(), str(file))
    except OSError as error:
        raise FileAccessError(f"cannot read {file}: {error.strerror or error}; give a readable text file") from None


def _decode(data: bytes, source: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise PromptError(f"{source} is not UTF-8 text (byte {error.start}); convert it first") from None
