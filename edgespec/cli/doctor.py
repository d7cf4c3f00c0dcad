"""``edgespec doctor``: whether `edgespec run` would run as configured, and what mends it where not."""

from __future__ import annotations

import collections.abc as abc
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgespec.cli.output import json_option, print_json
from edgespec.cli.progress import bar
from edgespec.devices.profile import MODES

if TYPE_CHECKING:
    from edgespec.doctor import Finding

MARKS = {"ok": "ok     ", "note": "note   ", "problem": "PROBLEM"}
OPTIONS = (
    click.option("--pair", metavar="NAME", help="A pair by name, or its folder.  [default: starter]"),
    click.option("--verifier", metavar="GGUF", type=click.Path(path_type=Path), help="A verifier of your own."),
    click.option("--draft", metavar="ONNX|lookup|none", help="A draft model of your own, prompt lookup, or nothing."),
    click.option("--profile", metavar="NAME|FILE", help="A device profile.  [default: the pair's, or none]"),
    click.option("--context", metavar="N", type=click.IntRange(min=1), help="Most tokens of prompt and answer."),
    click.option("--threads", metavar="N", type=click.IntRange(min=1), help="Threads of either side."),
    click.option("--mode", type=click.Choice(MODES), help="What is to run.  [default: the profile's, or auto]"),
    click.option("--rpc", metavar="HOST:PORT", multiple=True, help="A worker whose devices are used (repeatable)."),
    click.option("--deep", is_flag=True, help="Also read all files against their SHA-256, and answer a short prompt."),
)


def _run_options(command: abc.Callable[..., None]) -> abc.Callable[..., None]:
    for option in reversed(OPTIONS):
        command = option(command)
    return command


@click.command()
@_run_options
@json_option
def doctor(as_json: bool, **options: Any) -> None:
    """Look at all that `edgespec run` needs, and say what mends what is wrong.

    The options are those of `edgespec run`, with the same meaning. The exit code is 0 when that would run as it is
    configured, else that of the first problem. A note is good to know and nothing more.
    """
    if options["mode"] not in (None, "auto", "plain") and options["draft"] == "none":
        raise click.UsageError(f"--mode {options['mode']} needs a draft: it does not go with --draft none")
    from edgespec.doctor import Job, diagnose, first_problem
    from edgespec.doctor import as_json as content
    from edgespec.owner import Owner

    found: list[Finding] = []
    owner = Owner()  # a Ctrl-C inside one of llama.cpp's callbacks would be lost
    with bar("doctor") as progress:
        findings = iter(diagnose(Job(**options), progress))
        while (finding := owner.submit(lambda: next(findings, None)).result()) is not None:
            found.append(finding)
            if not as_json:
                _show(finding)
    owner.stop()
    if as_json:
        print_json(content(found))
    problem = first_problem(found)
    if problem is not None:
        names = ", ".join(dict.fromkeys(finding.what for finding in found if finding.status == "problem"))
        raise problem.error(f"`edgespec run` would not run as configured: {names}; each line above says what to do")


def _show(finding: Finding) -> None:
    click.echo(f"{MARKS[finding.status]} {finding.what}: {finding.detail}")
    if finding.remedy:
        click.echo(f"        -> {finding.remedy}")
