"""``edgespec distill``: a draft model for a verifier, trained on what the verifier writes, and what it is worth."""

from __future__ import annotations

import collections.abc as abc
import contextlib
import hashlib
import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgespec.cli.layers import layer_numbers
from edgespec.cli.output import json_option, print_json
from edgespec.cli.progress import Progress, bar

if TYPE_CHECKING:
    from quantize.distill import DistillResult, DistillSettings

PATH = click.Path(path_type=Path, readable=False)
COUNT, NONE_OR_MORE = click.IntRange(min=1), click.IntRange(min=0)
POSITIVE, WEIGHT = click.FloatRange(min=0, min_open=True), click.FloatRange(min=0)
STAGES = ("generate", "train", "export", "measure")


def _layers(_: click.Context, __: click.Parameter, value: str | None) -> int | tuple[int, ...] | None:
    """``4`` is a number of layers, ``0,1,28-29`` are layers."""
    if value is None:
        return None
    try:
        found = layer_numbers(value)
    except (ValueError, OverflowError):
        raise click.BadParameter(f"got {value!r}; allowed: how many, or which, as in 0,1,28-29") from None
    return int(value) if value.strip().isdecimal() else found


def _count(_: click.Context, __: click.Parameter, value: str | None) -> int | None:
    return None if value is None else int(value)


@click.command(short_help="Train a draft model for a verifier.")
@click.option("--verifier", metavar="GGUF", type=PATH, help="The model that writes the text and is learned from.")
@click.option("--out", metavar="DIR", type=PATH, required=True, help="The folder for all that is made: then a pair.")
@click.option(
    "--layers",
    metavar="N|0,1,28-29",
    callback=_layers,
    help="How many it keeps, half of them its first and half its last, or which.  [default: 4]",
)
@click.option("--head-vocab", metavar="N", type=NONE_OR_MORE, help="Ids it may propose; 0: all.  [default: 8192]")
@click.option("--prompts", metavar="FILE", type=PATH, help="Prompts to answer (.jsonl).  [default: it writes its own]")
@click.option("--tokens", metavar="N", type=COUNT, help="Tokens the verifier writes.  [default: a third of the hours]")
@click.option("--hours", metavar="H", type=POSITIVE, help="Of everything.  [default: 1, without --tokens or --epochs]")
@click.option("--epochs", metavar="N", type=POSITIVE, help="How often the text is read.  [default: till the hours end]")
@click.option("--batch-size", metavar="N", type=COUNT, help="Texts of --max-length in a training step.  [default: 2]")
@click.option("--learning-rate", metavar="RATE", type=POSITIVE, help="The highest.  [default: 0.001]")
@click.option("--max-length", metavar="N", type=COUNT, help="Tokens of a text.  [default: 896]")
@click.option(
    "--rows", "num_rows", metavar="N", type=COUNT, help="Texts written at once.  [default: by the model's size]"
)
@click.option("--hidden-weight", metavar="W", type=WEIGHT, help="Of hidden states in the loss.  [default: 0]")
@click.option(
    "--block-size",
    type=click.Choice(["32", "64", "128"]),
    callback=_count,
    help="Inputs that share a scale in the drafts.  [default: 32]",
)
@click.option("--device", type=click.Choice(["cpu", "cuda"]), help="Where to write and train.  [default: cpu]")
@click.option("--seed", metavar="N", type=NONE_OR_MORE, help="Of text and order.  [default: 0]")
@click.option("--threads", metavar="N", type=COUNT, help="CPU threads.  [default: the usable CPUs]")
@click.option("--suite", metavar="FILE", type=PATH, help="Prompts to measure on (.jsonl), each time.  [default: ours]")
@click.option("--resume", is_flag=True, help="Go on in DIR, with the options it was begun with.")
@click.option("--force", is_flag=True, help="Replace what an earlier distillation made in DIR.")
@json_option
def distill(out: Path, suite: Path | None, resume: bool, force: bool, as_json: bool, **given: Any) -> None:
    """Train a small draft model for a verifier, and measure what it is worth.

    The verifier writes text, a few of its layers learn to continue that text as it does, and the result is a pair in
    DIR, for run --pair DIR, with a report (report.md, report.json and two pictures) and a draft model of 8 bits and one
    of 4, of which the pair has the faster. DIR/work is needed for --resume only, and may be deleted in the end.

    What is killed or interrupted goes on with --resume --out DIR; more --tokens, --hours or --epochs may be given then.
    """
    settings = _settings(out, resume, force, {name: value for name, value in given.items() if value is not None})
    from edgespec.agreement.drafting import PROMPTS
    from edgespec.bench.suite import read_suite
    from quantize.distill import distill as make
    from quantize.distill.lock import alone_in
    from quantize.extras import require

    require("matplotlib")
    questions = [(question.category, question.prompt) for question in read_suite(suite or PROMPTS)]
    with _bars() as progress:
        made = make(settings, progress)
        with alone_in(made.out):
            content = _measured(made, questions, settings, suite, progress)
    _show(made, content, as_json)


def _settings(out: Path, resume: bool, force: bool, given: dict[str, Any]) -> DistillSettings:
    from quantize.distill.settings import DistillSettings, has_settings, saved_settings

    if resume and not force and has_settings(out):
        return saved_settings(out, given)
    if "verifier" not in given:
        raise click.UsageError("nothing says what to learn from; give --verifier FILE.gguf")
    return DistillSettings(**given, out=out, resume=resume, force=force)


def _measured(
    made: DistillResult,
    questions: abc.Sequence[tuple[str, str]],
    settings: DistillSettings,
    suite: Path | None,
    progress: Progress,
) -> dict[str, Any]:
    """The report's content; measured unless the folder has it already of the same drafts and prompts."""
    from edgespec.agreement.drafting import measure_drafts
    from edgespec.agreement.report import DATA, FILES, Report
    from edgespec.pairs import MANIFEST
    from edgespec.pairs.made import write_pair

    facts = {**made.settings, "suite": suite and suite.name, "suite_sha256": _digest(questions)}
    if all((made.out / name).is_file() for name in (MANIFEST, *FILES)) and (
        content := _report_of(made.out / DATA, facts)
    ):
        return content
    progress("measure", 0.0)
    draftings = measure_drafts(
        list(made.drafts.values()),
        made.verifier,
        questions,
        seed=settings.seed + 1,
        num_threads=settings.threads,
        progress=lambda stage, fraction: progress(f"measure: {stage}", 0.95 * fraction),
    )
    report = Report(facts, made.history, dict(zip(made.drafts, draftings, strict=True)))
    draft = made.drafts[report.chosen].name
    named = made.verifier.name.encode("utf-8", "replace").decode("utf-8")  # a file's name may be no text
    write_pair(made.out, made.verifier, draft, description=f"{named} and a draft model distilled from it")
    report.write(made.out)
    progress("measure", 1.0)
    return report.as_dict()


def _digest(questions: abc.Sequence[tuple[str, str]]) -> str:
    return hashlib.sha256(json.dumps(questions).encode("ascii")).hexdigest()


def _report_of(path: Path, facts: dict[str, Any]) -> dict[str, Any] | None:
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if all(content["settings"][name] == facts[name] for name in ("checkpoint", "suite_sha256", "seed")):
            _draft_lines(content)  # all that is shown is there
            return content
    return None


def _show(made: DistillResult, content: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json({"out": str(made.out), **content})
        return
    for line in _draft_lines(content):
        click.echo(line)
    click.echo(f"report: {made.out / 'report.md'}")
    click.echo(f"run it with: edgespec run --pair {shlex.quote(str(made.out))}", err=True)


def _draft_lines(content: dict[str, Any]) -> list[str]:
    lines, chosen = [], content["chosen"]
    for name, draft in content["drafts"].items():
        cold, warm = (draft["temperatures"][temperature]["agreement"] for temperature in ("0", "0.8"))
        mark = " (in the pair)" if name == chosen else ""
        lines.append(
            f"{name}{mark}: {draft['size_bytes'] / 1e6:.1f} MB, {draft['ms_per_token']:.2f} ms a token, "
            f"agreement {cold:.3f} at T=0, {warm:.3f} at T=0.8"
        )
    return lines


@contextlib.contextmanager
def _bars() -> abc.Iterator[Progress]:
    """A bar for each stage, one after the other; a stage's name may have more behind a colon."""
    with contextlib.ExitStack() as stack:
        opened: dict[str, Progress] = {}

        def update(stage: str, fraction: float) -> None:
            name = stage.partition(":")[0]
            if name not in opened:
                stack.close()
                label = f"distill {STAGES.index(name) + 1}/{len(STAGES)}"
                opened.clear()
                opened[name] = stack.enter_context(bar(label))
            opened[name](stage, fraction)

        yield update
