"""``edgespec run``: one prompt in, the verifier's answer out."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import click

from edgespec.cli import report
from edgespec.cli.chat import chat
from edgespec.core.policy import Fixed, Policy
from edgespec.core.sequence import RULES, Rule, SamplingParams
from edgespec.devices.profile import POLICIES, Profile
from edgespec.engine.lossless import check_params
from edgespec.errors import FileAccessError, PromptError
from edgespec.loading import AUTO, MIN_CONFIDENCE, NO_PROFILE, choose_profile, load, profiled_mode, profiled_policy
from edgespec.runtime import MODES, Runtime
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
    type=click.Choice((AUTO, *MODES)),
    help="auto: what pays on this box; plain: the verifier alone; sequential: draft, then verify; overlapped: at the "
    "same time.  [default: the profile's, or auto]",
)
@click.option(
    "--policy",
    type=click.Choice(POLICIES),
    help="How long drafts are. goodput: as long as pays; threshold: by acceptance; fixed: --draft-length.  [default: "
    "the profile's, or goodput]",
)
@click.option(
    "--draft-length",
    type=int,
    help=f"Tokens a draft, always.  [default: the profile's, or {NO_PROFILE.speculation.num_candidates}]",
)
@click.option(
    "--min-confidence",
    type=float,
    help=f"With policy fixed: end a draft before a token of less; for a model its lead in logits, for lookup how many "
    f"tokens matched.  [default: {MIN_CONFIDENCE}]",
)
@click.option(
    "--rpc",
    "workers",
    multiple=True,
    metavar="HOST:PORT",
    help="Use the devices of an edgespec worker too (repeatable).",
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
    mode: str | None
    policy: str | None
    draft_length: int | None
    min_confidence: float | None
    workers: tuple[str, ...]
    as_json: bool
    check_lossless: bool

    def check(self) -> None:
        """Refuse combinations that contradict each other."""
        if self.interactive and (self.raw or self.as_json or self.check_lossless):
            raise click.UsageError("-i is a chat: it does not go with --raw, --json or --check-lossless")
        if self.raw and self.system:
            raise click.UsageError("--raw passes the prompt as it is: it does not go with --system")
        if self.mode not in (None, AUTO, "plain") and self.draft == "none":
            raise click.UsageError(f"--mode {self.mode} needs a draft: it does not go with --draft none")
        if self.policy not in (None, "fixed") and (self.draft_length, self.min_confidence) != (None, None):
            raise click.UsageError(
                f"--policy {self.policy} chooses itself: it does not go with --draft-length or --min-confidence"
            )
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
        return load(
            self.pair,
            self.verifier,
            self.draft,
            profile=device,
            num_ctx=self.context,
            num_threads=self.threads,
            mode=cast(Any, self.mode or profiled_mode(device, self.draft)),
            policy=self._policy(device),
            workers=self.workers,
            progress=report.progress,
        )

    def _policy(self, device: Profile) -> Policy:
        speculation = device.speculation
        if (self.draft_length, self.min_confidence) != (None, None):
            length = speculation.num_candidates if self.draft_length is None else self.draft_length
            return Fixed(length, MIN_CONFIDENCE if self.min_confidence is None else self.min_confidence)
        named = speculation if self.policy is None else replace(speculation, policy=self.policy)
        return profiled_policy(replace(device, speculation=named))


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
