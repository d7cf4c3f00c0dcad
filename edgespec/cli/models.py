"""``edgespec models``: which pairs there are, whether they are whole, and how to get them."""

from __future__ import annotations

import collections.abc as abc
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgespec.cli.output import json_option, print_json
from edgespec.cli.progress import bar
from edgespec.errors import EdgespecError
from edgespec.paths import data_dir, pairs_dir

if TYPE_CHECKING:
    from edgespec.cli.pair_check import Outcome
    from edgespec.pairs import Pair


@click.group(invoke_without_command=True)
@click.pass_context
def models(ctx: click.Context) -> None:
    """List, check and download pairs: a verifier and the draft model that fits it.

    PAIR is a folder with a pair.toml, the path of a manifest, or a name; your own pairs win by name.
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


@models.command("list")
@json_option
def list_(as_json: bool) -> None:
    """List all pairs: the well-known ones and your own."""
    from edgespec.pairs import manifests

    rows = [_row(name, path) for name, path in sorted(manifests().items())]
    if as_json:
        print_json(rows)
        return
    width = max((len(row["name"]) for row in rows), default=0)
    for row in rows:
        click.echo(f"{row['name']:{width}}  {row['where']:9}  {row['state']}")
        if row["description"]:
            click.echo(f"{'':{width}}  {row['description']} ({row['license']})")
    click.echo(f"your own pairs: {pairs_dir()}/NAME/pair.toml", err=True)


@models.command()
@click.argument("pair", metavar="PAIR")
@json_option
def show(pair: str, as_json: bool) -> None:
    """Print the manifest of PAIR, and what is missing."""
    from edgespec.pairs import NEVER, as_dict, load_pair

    chosen = load_pair(pair)
    content = as_dict(chosen) | _state(chosen)
    if as_json:
        print_json(content)
        return
    if chosen.pulled == NEVER:
        content["pulled"] = "never: nobody has seen this manifest work yet"
    for key, value in content.items():
        for inner, text in value.items() if isinstance(value, dict) else [("", value)]:
            if text not in ("", []):
                shown = ", ".join(map(str, text)) if isinstance(text, list) else text
                click.echo(f"{f'{key} {inner}':20} {shown}")


@models.command()
@click.argument("name")
@click.option("--force", is_flag=True, help="Pull it anew, and replace the one that is there.")
@json_option
def pull(name: str, force: bool, as_json: bool) -> None:
    """Download the pair NAME from the hub and build its draft model.

    What was fetched before a break or Ctrl-C is kept: the same command goes on from there. Needs the extras hub and
    quantize.
    """
    from edgespec.cli.pair_check import check_vocabulary
    from edgespec.pairs import MANIFEST, as_dict, load_pair, load_recipe, what_is_missing
    from edgespec.pairs.pull import pull as fetch

    recipe = load_recipe(name)
    folder = pairs_dir() / recipe.name
    is_there = (folder / MANIFEST).is_file() and not force and not what_is_missing(load_pair(str(folder)))
    if not is_there:
        with bar(recipe.name) as progress:
            fetch(recipe, check_vocabulary, force=force, progress=progress)
    chosen = load_pair(str(folder))
    if as_json:
        print_json(as_dict(chosen) | _state(chosen) | {"was_there": is_there})
        return
    click.echo(f"{folder} {'is there already; --force pulls it anew' if is_there else 'is ready'}")
    click.echo(f"use it: edgespec run --pair {recipe.name}")


@models.command()
@click.argument("pair", metavar="PAIR")
@click.option(
    "--max-tokens", metavar="N", type=click.IntRange(min=0), default=1000, show_default=True,
    help="Tokens of text to predict the acceptance on; 0 leaves that out.",
)  # fmt: skip
@click.option("--text", "texts", metavar="FILE", type=click.Path(path_type=Path), help="Predict it on this text.")
@click.option("--threads", metavar="N", type=click.IntRange(min=1), help="CPU threads.  [default: the usable CPUs]")
@json_option
def check(pair: str, max_tokens: int, texts: Path | None, threads: int | None, as_json: bool) -> None:
    """Check PAIR: its files, vocabularies, predicted acceptance.

    Every check is a line: the SHA-256 of the files, both tokenizers' fingerprints, both vocabularies token by token,
    sample texts to tokens and back, and how many tokens a round will bring. The exit code is that of the first check
    that failed.
    """
    from edgespec.cli.pair_check import Prediction, check_pair
    from edgespec.pairs import load_pair

    chosen = load_pair(pair)
    with bar(chosen.name) as progress:
        found = list(check_pair(chosen, Prediction(max_tokens, texts, threads), progress))
    if as_json:
        print_json(
            {"pair": chosen.name, "ok": all(one.ok for one in found), "checks": [one.as_dict() for one in found]}
        )
    else:
        _print_checks(found)
    failed = [one for one in found if one.error is not None]
    if failed and failed[0].error is not None:
        names = ", ".join(one.name for one in failed)
        raise type(failed[0].error)(f"{chosen.name}: {len(failed)} of {len(found)} checks failed: {names}")


def _print_checks(found: abc.Sequence[Outcome]) -> None:
    for one in found:
        click.echo(f"{'ok    ' if one.ok else 'FAILED'} {one.name}: {one.detail}")
        for temperature, by_length in one.data.get("tokens_per_round", {}).items():
            lengths = "  ".join(f"{length}: {tokens:.2f}" for length, tokens in by_length.items())
            click.echo(f"       tokens per round by draft length, at temperature {temperature}:  {lengths}")


def _row(name: str, manifest: Path) -> dict[str, Any]:
    """What ``list`` says of a pair; one that is not right does not hide the others."""
    from edgespec.pairs import read_pair

    try:
        pair = read_pair(manifest, name)
    except EdgespecError as error:
        state = {"where": _where(manifest, ""), "manifest": str(manifest), "ready": False, "state": str(error)}
        return {"name": name, "description": "", "license": ""} | state
    return {"name": name, "description": pair.description, "license": pair.license} | _state(pair)


def _state(pair: Pair) -> dict[str, Any]:
    """``state``: ready, to be pulled, or what is wrong and what to do about it."""
    from edgespec.pairs import HubVerifier, what_is_missing

    missing = what_is_missing(pair)
    state = "to be pulled" if isinstance(pair.verifier, HubVerifier) else missing or "ready"
    place = _where(pair.manifest, pair.pulled)
    return {"where": place, "manifest": str(pair.manifest), "ready": not missing, "state": state}


def _where(manifest: Path, pulled: str) -> str:
    """``shipped`` with edgespec; ``installed`` by pull; or ``yours``."""
    if manifest.parent == data_dir("models"):
        return "shipped"
    return "installed" if pulled else "yours"
