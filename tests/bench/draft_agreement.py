"""What a draft foresees of its verifier's own answers: ``python -m tests.bench.draft_agreement PROMPTS --draft DIR``.

The verifier answers the first turns of every n-th prompt at T=0 and at T=0.8 (edgespec/agreement/drafting.py); the
draft reads the answers and is asked for each next token. Prints markdown: agreement by category, then by draft length
what is accepted and what speedup over plain decoding that promises here, without lookup. Several drafts (--draft again)
read the same answers.
"""

from __future__ import annotations

import collections.abc as abc
import sys
from pathlib import Path

import click

from edgespec.agreement.drafting import Drafting, measure_drafts
from edgespec.agreement.drafting_result import DEPTH
from edgespec.bench.suite import read_suite
from edgespec.cli.progress import bar
from edgespec.errors import EdgespecError
from edgespec.pairs import load_pair
from tests.bench.speedup import TASKS


def questions(prompts: Path, every: int) -> list[tuple[str, str]]:
    """The suite's tasks in their order, and last all conversations as one."""
    found = [
        (question.category if question.category in TASKS else "multi-turn", question.prompt)
        for question in read_suite(prompts, every)
    ]
    return sorted(found, key=lambda question: (*TASKS, "multi-turn").index(question[0]))


def lines(drafting: Drafting) -> abc.Iterator[str]:
    yield f"{drafting.draft.name}: {drafting.size_bytes / 1e6:.1f} MB, {drafting.ms_per_token:.2f} ms a token on "
    yield f"{drafting.num_threads} threads with {DEPTH} in the cache; {drafting.num_prompts} prompts"
    if drafting.num_left_out:
        yield f"{drafting.num_left_out} prompts were too long and are left out"
    yield from ("", *drafting.category_lines(), "", *drafting.length_lines(), "")


@click.command()
@click.argument("prompts", type=click.Path(exists=True, path_type=Path))
@click.option("--draft", "drafts", type=click.Path(exists=True, path_type=Path), multiple=True, required=True)
@click.option("--verifier", type=click.Path(exists=True, path_type=Path), help="A GGUF.  [default: the starter pair's]")
@click.option("--every", default=6, show_default=True, help="Take every n-th prompt.")
@click.option("--max-tokens", default=80, show_default=True)
@click.option("--slots", default=8, show_default=True, help="Answers written at once.")
@click.option("--seed", default=1, show_default=True)
@click.option("--threads", type=int)
def main(
    prompts: Path,
    drafts: tuple[Path, ...],
    verifier: Path | None,
    every: int,
    max_tokens: int,
    slots: int,
    seed: int,
    threads: int | None,
) -> None:
    try:
        with bar("draft agreement") as progress:
            found = measure_drafts(
                drafts,
                verifier or load_pair("starter").verifier.find(),
                questions(prompts, every),
                max_tokens=max_tokens,
                seed=seed,
                num_threads=threads,
                num_slots=slots,
                progress=progress,
            )
    except EdgespecError as error:
        click.echo(error, err=True)
        sys.exit(error.exit_code)
    for drafting in found:
        for line in lines(drafting):
            click.echo(line)


if __name__ == "__main__":
    main()
