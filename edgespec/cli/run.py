"""``edgespec run``: one prompt in, the verifier's answer out."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import click

from edgespec.cli import report
from edgespec.cli.chat import chat
from edgespec.core.policy import DEFAULT_POLICY, Fixed
from edgespec.core.sequence import RULES, Rule, SamplingParams
from edgespec.devices.profile import Profile
from edgespec.engine.lossless import check_params
from edgespec.errors import FileAccessError, PromptError
from edgespec.loading import NO_PROFILE, choose_profile, load
from edgespec.runtime import MODES, Mode, Runtime
from edgespec.text.chat import Message

DEFAULT = SamplingParams()


@click.command()
@click.argument("prompt", required=False)
@click.option(
    "--file",
    "file",
    type=click.Path(path_type=Path, readable=False),
    help="Read the prompt (or what follows PROMPT) here.",
)
@click.option("-i", "--interactive", is_flag=True, help="Chat in the terminal; PROMPT is the first turn.")
@click.option("--pair", metavar="NAME", help="A verifier and its draft model by name.  [default: starter]")
@click.option(
    "--verifier", metavar="GGUF", type=click.Path(path_type=Path, readable=False), help="A verifier of your own."
)
@click.option(
    "--draft",
    metavar="ONNX|lookup|none",
    help="A draft model of your own, prompt lookup, or nothing.  [default: the pair's; with --verifier alone: lookup]",
)
@click.option(
    "--profile",
    metavar="NAME|FILE",
    help="A device profile, for what no other option says; see: edgespec profiles.  [default: the pair's, or none]",
)
@click.option(
    "--context",
    metavar="N",
    type=int,
    help=f"Most tokens of prompt and answer.  [default: the profile's, or at most {NO_PROFILE.serving.context}]",
)
@click.option(
    "--threads", metavar="N", type=int, help="Threads of either side.  [default: the profile's, or the usable CPUs]"
)
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
@click.option(
    "--mode",
    type=click.Choice(MODES),
    help=f"plain: the verifier alone.  [default: the profile's, or {NO_PROFILE.speculation.mode}]",
)
@click.option(
    "--draft-length",
    type=int,
    help=f"Tokens a draft.  [default: the profile's, or {NO_PROFILE.speculation.num_candidates}]",
)
@click.option(
    "--min-confidence",
    type=float,
    default=DEFAULT_POLICY.min_confidence,
    show_default=True,
    help="End a draft before a token that led by less, in logits; 0 is off.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the text.")
@click.option("--check-lossless", is_flag=True, help="Compare the answer with plain decoding, token by token.")
def run(prompt: str | None, **options: Any) -> None:
    """Answer PROMPT (or standard input, or --file).

    The answer goes to standard output as it is made; a summary goes to standard error.
    """
    if sys.stdout is None:
        raise FileAccessError(
            "standard output is closed: the answer has nowhere to go; redirect it to a file or a pipe"
        )
    chosen = RunOptions(**options)
    chosen.check()
    params = chosen.params()
    starts_empty = chosen.interactive and not prompt and chosen.file is None
    text = None if starts_empty else _read_prompt(prompt, chosen.file)
    with chosen.load() as runtime:
        if chosen.interactive:
            chat(runtime, params, chosen.system, text)
        elif text is not None:
            _answer(runtime, params, text, chosen)


@dataclass(frozen=True)
class RunOptions:
    """The command's options, by their names."""

    file: Path | None
    interactive: bool
    pair: str | None
    verifier: Path | None
    draft: str | None
    profile: str | None
    context: int | None
    threads: int | None
    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repeat_penalty: float
    seed: int | None
    stop: tuple[str, ...]
    system: str | None
    raw: bool
    rule: Rule
    mode: Mode | None
    draft_length: int | None
    min_confidence: float
    as_json: bool
    check_lossless: bool

    def check(self) -> None:
        """Refuse combinations that contradict each other."""
        if self.interactive and (self.raw or self.as_json or self.check_lossless):
            raise click.UsageError("-i is a chat: it does not go with --raw, --json or --check-lossless")
        if self.raw and self.system:
            raise click.UsageError("--raw passes the prompt as it is: it does not go with --system")
        if self.mode not in (None, "plain") and self.draft == "none":
            raise click.UsageError(f"--mode {self.mode} needs a draft: it does not go with --draft none")
        if self.check_lossless:
            check_params(self.params())

    def params(self) -> SamplingParams:
        return SamplingParams(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repeat_penalty=self.repeat_penalty,
            seed=self.seed,
            stop=self.stop,
            rule=self.rule,
        )

    def load(self) -> Runtime:
        device = choose_profile(self.profile, self.pair, self.verifier)
        mode = self._mode(device)
        length = device.speculation.num_candidates if self.draft_length is None else self.draft_length
        return load(
            self.pair,
            self.verifier,
            # Plain decoding needs no draft model: do not build or load one.
            "none" if mode == "plain" else self.draft,
            profile=device,
            num_ctx=self.context,
            num_threads=self.threads,
            mode=mode,
            policy=Fixed(length, self.min_confidence),
            progress=report.progress,
        )

    def _mode(self, device: Profile) -> Mode:
        """What is said wins over the profile, and a draft that is asked for is used."""
        if self.mode is not None:
            return self.mode
        if self.draft is not None:
            return "plain" if self.draft == "none" else "sequential"
        return cast(Mode, device.speculation.mode)


def _answer(runtime: Runtime, params: SamplingParams, text: str, chosen: RunOptions) -> None:
    system = [Message("system", chosen.system)] if chosen.system else []
    prompt = text if chosen.raw else [*system, Message("user", text)]
    stream = runtime.stream(prompt, params, raw=chosen.raw, check_lossless=chosen.check_lossless)
    result = report.collect(stream, report.keep if chosen.as_json else report.show)
    report.answer(runtime, result, as_json=chosen.as_json)
    if result.finish_reason == "cancelled":
        raise KeyboardInterrupt
    if result.divergences is not None:
        report.check(result.divergences)


def _read_prompt(prompt: str | None, file: Path | None) -> str:
    """PROMPT, the file, both (PROMPT first), or standard input; PromptError for nothing."""
    parts = [prompt] if prompt is not None else []
    if file is not None:
        parts.append(_read_file(file))
    if not parts:
        if sys.stdin is None or sys.stdin.isatty():
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
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise PromptError(f"{source} is not UTF-8 text (byte {error.start}); convert it first") from None
