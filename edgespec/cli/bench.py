"""``edgespec bench``: what speculation brings. So far on simulated devices only."""

from __future__ import annotations

import collections.abc as abc
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgespec.cli.output import json_option, print_json
from edgespec.cli.progress import bar

if TYPE_CHECKING:
    from edgespec.bench.simulation import Outcome, Real, Way
    from edgespec.core.policy import Policy

ALL = "all"
MODES = ("plain", "sequential", "overlapped", "auto")


@click.command()
@click.option(
    "--simulate", "profiles", metavar="PROFILE|all", multiple=True,
    help="Simulate the device of this profile (repeatable), or those of all shipped ones.",
)  # fmt: skip
@click.option("--pair", metavar="NAME", help="The pair whose text and acceptance are used.  [default: starter]")
@click.option("--verifier", metavar="GGUF", type=click.Path(path_type=Path, readable=False), help="Another verifier.")
@click.option("--draft", metavar="ONNX|lookup", help="Another draft.  [default: the pair's; with --verifier: lookup]")
@click.option(
    "--suite", metavar="JSONL", type=click.Path(path_type=Path, readable=False),
    help='Prompts, {"category": "...", "turns": ["..."]} a line, as in Spec-Bench.  [default: a few built-in ones]',
)  # fmt: skip
@click.option("--every", metavar="N", type=click.IntRange(min=1), default=1, show_default=True, help="Every n-th one.")
@click.option("--max-tokens", metavar="N", type=click.IntRange(min=2), default=64, show_default=True)
@click.option("--temperature", type=float, default=0.0, show_default=True)
@click.option("--modes", metavar="LIST", default=",".join(MODES), show_default=True)
@click.option("--draft-length", metavar="N", type=int, help="Always draft so many tokens.  [default: what pays]")
@json_option
def bench(profiles: tuple[str, ...], **options: Any) -> None:
    """Simulate a pair on other devices: real models, text and acceptance at the pace that a device would have.

    A simulation, not a measurement. The paces are rooflines over published figures (edgespec/bench/device_curves.py),
    stretched so that this box keeps up: give it two free cores. A device with five prompts takes about two minutes.
    """
    if not profiles:
        raise click.UsageError("all that bench can do yet is simulate: give --simulate PROFILE, or --simulate all")
    _simulate(profiles, **options)


def _simulate(
    profiles: tuple[str, ...],
    pair: str | None,
    verifier: Path | None,
    draft: str | None,
    suite: Path | None,
    every: int,
    max_tokens: int,
    temperature: float,
    modes: str,
    draft_length: int | None,
    as_json: bool,
) -> None:
    from edgespec.bench.device_curves import DEVICES, simulated_device
    from edgespec.bench.simulation import Models, Simulation, measure
    from edgespec.bench.suite import read_suite
    from edgespec.core.sequence import SamplingParams

    names = list(DEVICES) if ALL in profiles else profiles
    devices = [simulated_device(name) for name in dict.fromkeys(names)]
    questions = read_suite(suite, every)
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=1)
    simulation = Simulation(questions, params, _modes(modes), _policy(draft_length))
    with bar("bench") as progress, Models(*_paths(pair, verifier, draft)) as models:
        progress("measuring this box", 0.0)
        real = measure(models.verifier, models.drafter)
        outcomes = [simulation.run(models, device, real.dilation(device), progress) for device in devices]
    if as_json:
        print_json(_as_dict(outcomes, real, len(questions), params))
        return
    for line in _table(outcomes):
        click.echo(line)
    for line in _notes(outcomes, len(questions), params):
        click.echo(line, err=True)


def _modes(text: str) -> list[Way]:
    from edgespec.bench.simulation import WAYS
    from edgespec.errors import ParameterError

    asked = [mode.strip() for mode in text.split(",")]
    if wrong := [mode for mode in asked if mode not in WAYS]:
        raise ParameterError(f"modes: got {wrong[0]!r}; allowed: {', '.join(WAYS)}, with commas between them")
    return [way for way in WAYS if way in asked]


def _policy(draft_length: int | None) -> Policy:
    from edgespec.bench.simulation import MAX_DRAFT
    from edgespec.core.check import check_int
    from edgespec.core.policy import Fixed, Goodput

    if draft_length is None:
        return Goodput(MAX_DRAFT)
    check_int("draft length", draft_length, 1, MAX_DRAFT)
    return Fixed(draft_length)


def _paths(pair: str | None, verifier: Path | None, draft: str | None) -> tuple[Path, str | Path]:
    """The verifier's file and the draft, as ``load`` chooses them."""
    from edgespec.cli import report
    from edgespec.pairs import DEFAULT_PAIR, load_pair

    if draft == "none":
        raise click.UsageError("--draft none leaves nothing to compare; give a draft model or lookup")
    if pair is None and verifier is not None:
        return verifier, draft or "lookup"
    chosen = load_pair(pair or DEFAULT_PAIR)
    return verifier or chosen.verifier.find(), draft or chosen.ensure_draft(report.progress)


def _table(outcomes: abc.Sequence[Outcome]) -> list[str]:
    """Markdown. Rates are the device's, as simulated; behind them the ratio to plain."""
    modes = list(outcomes[0].runs)
    both = "overlapped" in modes and "sequential" in modes
    titles = ["simulated profile", "device", "verifier", "verify / draft token, ms"]
    titles += [f"{mode}, tokens/s" for mode in modes] + ["overlapped / sequential"] * both + ["acceptance", "late"]
    rows = [titles, ["---"] * len(titles), *(_row(outcome, modes, both) for outcome in outcomes)]
    return ["SIMULATION, not a measurement of these devices", "", *(f"| {' | '.join(row)} |" for row in rows)]


def _row(outcome: Outcome, modes: list[Way], both: bool) -> list[str]:
    device = outcome.device
    costs = f"{1000 * device.verify_s(1):.1f} / {1000 * device.step_s:.1f}"
    rates = [_rate(outcome, mode) for mode in modes]
    ratio = [f"{outcome.ratio('overlapped', 'sequential'):.2f}"] if both else []
    drafted = [mode for mode in modes if any(run.drafted for run in outcome.runs[mode])]
    acceptance = f"{outcome.acceptance(drafted[0]):.2f}" if drafted else ""
    late = f"{outcome.late:.1%}{' SPOILED' if outcome.spoiled else ''}"
    return [device.profile, device.verifier.name, device.model.name, costs, *rates, *ratio, acceptance, late]


def _rate(outcome: Outcome, mode: Way) -> str:
    rate = f"{outcome.rate(mode):.1f}"
    return f"{rate} ({outcome.ratio(mode, 'plain'):.2f})" if "plain" in outcome.runs and mode != "plain" else rate


def _notes(outcomes: abc.Sequence[Outcome], num_prompts: int, params: Any) -> abc.Iterator[str]:
    tokens = f"{num_prompts} prompts, at most {params.max_tokens} tokens each, temperature {params.temperature:g}"
    yield f"simulated: {tokens}; in brackets: over plain, the median of the prompts"
    dilations = ", ".join(f"{outcome.device.profile} {outcome.dilation:.1f}" for outcome in outcomes)
    yield f"simulated times were stretched by: {dilations}"
    for source in dict.fromkeys(source for outcome in outcomes for source in outcome.device.sources):
        yield f"source: {source}"
    if any(outcome.spoiled for outcome in outcomes):
        yield "SPOILED: this box did not keep up; free its cores and run again"


def _as_dict(outcomes: abc.Sequence[Outcome], real: Real, num_prompts: int, params: Any) -> dict[str, Any]:
    return {
        "simulated": True,
        "prompts": num_prompts,
        "max_tokens": params.max_tokens,
        "temperature": params.temperature,
        "this_box": {
            "verify_ms": {width: round(1000 * seconds, 2) for width, seconds in real.verify_s.items()},
            "draft_token_ms": round(1000 * real.step_s, 2),
        },
        "profiles": [outcome.as_dict() for outcome in outcomes],
    }
