"""What ``edgespec run`` prints: answers, summaries, progress, lossless reports."""

from __future__ import annotations

import collections.abc as abc
import sys
from typing import Any

import click

from edgespec.cli.output import print_json
from edgespec.engine.lossless import Divergence
from edgespec.errors import LosslessError
from edgespec.runtime import Chunk, Result, Runtime, Stream


def show(text: str) -> None:
    """Answer text, at once and as it is (click.echo would take escape sequences out)."""
    sys.stdout.write(text)
    sys.stdout.flush()


def collect(stream: Stream, show_text: abc.Callable[[str], None]) -> Result:
    """Read a stream to its end, showing text on the way; Ctrl-C ends it and keeps what came."""
    got: list[Chunk] = []
    is_cancelled = False
    with stream:
        while not got or got[-1].finish_reason is None:
            try:
                got.append(next(stream))
                show_text(got[-1].text)
            except KeyboardInterrupt:
                if is_cancelled:
                    raise  # whoever asks twice does not want to wait for the round to end
                stream.cancel()
                is_cancelled = True
    return Result.of(got)


def keep(text: str) -> None:
    """Show nothing: for --json, which prints the whole at the end."""


def answer(runtime: Runtime, result: Result, *, as_json: bool) -> None:
    """The JSON object; or the newline after the text that was shown, and the summary."""
    if as_json:
        print_json(as_dict(runtime, result))
        return
    show("\n")
    click.echo(summary(runtime, result), err=True)


def summary(runtime: Runtime, result: Result) -> str:
    stats = result.stats
    parts = [
        f"{stats.completion_tokens} tokens",
        f"{stats.tokens_per_s:.1f} tokens/s",
        f"first after {stats.ttft_s:.2f} s",
    ]
    if stats.drafted:
        parts.append(f"acceptance {stats.acceptance_rate:.0%} ({stats.accepted} of {stats.drafted})")
        parts.append(f"{stats.tokens_per_round:.2f} tokens per round")
    if stats.speedup:
        parts.append(f"{stats.speedup:.2f} x plain")
    parts.append(f"{stats.mode}, draft {runtime.draft_name}")
    if stats.seed is not None:
        parts.append(f"seed {stats.seed}")
    if result.finish_reason != "stop":
        parts.append(result.finish_reason)
    return " | ".join(parts)


def as_dict(runtime: Runtime, result: Result) -> dict[str, Any]:
    stats = result.stats
    content: dict[str, Any] = {
        "text": result.text,
        "finish_reason": result.finish_reason,
        "prompt_tokens": stats.prompt_tokens,
        "completion_tokens": stats.completion_tokens,
        "rounds": stats.rounds,
        "drafted": stats.drafted,
        "accepted": stats.accepted,
        "acceptance_rate": round(stats.acceptance_rate, 4),
        "tokens_per_round": round(stats.tokens_per_round, 3),
        "tokens_per_s": round(stats.tokens_per_s, 3),
        "ttft_s": round(stats.ttft_s, 4),
        "speedup": round(stats.speedup, 3) if stats.speedup else None,
        "draft_s": round(stats.draft_s, 4),
        "hidden_s": round(stats.hidden_s, 4),
        "verify_s": round(stats.verify_s, 4),
        "mode": stats.mode,
        "placement": runtime.placement,
        "degraded": runtime.degraded.as_list(),
        "draft": runtime.draft_name,
        "verifier": runtime.verifier_name,
        "seed": stats.seed,
    }
    if result.divergences is not None:
        content["divergences"] = [divergence.as_dict() for divergence in result.divergences]
    return content


def check(divergences: abc.Sequence[Divergence]) -> None:
    """The lossless report, on standard error; raises LosslessError when a difference has no explanation."""
    for found in divergences:
        click.echo(f"lossless: {found}", err=True)
    unexplained = sum(not found.explained for found in divergences)
    if unexplained:
        raise LosslessError(
            f"{unexplained} of {len(divergences)} differences from plain decoding are not near-ties: a bug in edgespec "
            "or in a backend; please report it with the prompt, the models and the seed"
        )
    verdict = "no difference from plain decoding" if not divergences else f"{len(divergences)} near-ties, all explained"
    click.echo(f"lossless: {verdict}", err=True)


def progress(stage: str, fraction: float) -> None:
    """One line that rewrites itself on a terminal; elsewhere only its beginning and its end."""
    line = f"building the draft model, once: {stage} {fraction:4.0%}"
    if sys.stderr is not None and sys.stderr.isatty():
        click.echo(f"\r\x1b[K{line}", nl=fraction >= 1, err=True)
    elif fraction in (0, 1):
        click.echo(line, err=True)
