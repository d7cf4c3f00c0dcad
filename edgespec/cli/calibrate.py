"""``edgespec calibrate``: measure what rounds cost on this box, and which mode pays."""

from __future__ import annotations

import collections.abc as abc
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgespec.cli.output import json_option, print_json
from edgespec.cli.progress import Progress, bar

if TYPE_CHECKING:
    from edgespec.calibration import Calibration, Key
    from edgespec.core.costs import Curves
    from edgespec.devices.placement import Placement
    from edgespec.devices.threads import Threads
    from edgespec.opening import Order
    from edgespec.owner import Owner

PATH = click.Path(path_type=Path, readable=False)


@click.command(short_help="Measure what rounds cost here, and which mode pays.")
@click.option("--pair", metavar="NAME", help="A verifier and its draft model by name.  [default: starter]")
@click.option("--verifier", metavar="GGUF", type=PATH, help="A verifier of your own.")
@click.option(
    "--draft",
    metavar="ONNX|lookup|none",
    help="A draft model of your own, prompt lookup, or nothing.  [default: the pair's; with --verifier alone: lookup]",
)
@click.option("--profile", metavar="NAME|FILE", help="A device profile.  [default: the pair's, or none]")
@click.option("--context", metavar="N", type=int, help="Most tokens of prompt and answer.  [default: the profile's]")
@click.option(
    "--threads",
    metavar="N",
    type=click.IntRange(min=1),
    help="Most threads of either side.  [default: the profile's, or the usable CPUs]",
)
@click.option(
    "--rpc",
    "workers",
    multiple=True,
    metavar="HOST:PORT",
    help="Use the devices of an edgespec worker too (repeatable).",
)
@click.option("--force", is_flag=True, help="Measure even if this was done before.")
@json_option
def calibrate(
    pair: str | None,
    verifier: Path | None,
    draft: str | None,
    profile: str | None,
    context: int | None,
    threads: int | None,
    workers: tuple[str, ...],
    force: bool,
    as_json: bool,
) -> None:
    """Measure what verifying, drafting and both at once cost on this box, and which mode pays. Takes about a minute.

    What is found is kept in the cache, and `edgespec run` with the same options goes by it.
    """
    from edgespec import calibration
    from edgespec.loading import AUTO, resolve
    from edgespec.owner import Owner
    from edgespec.survey import look_at_box

    with bar("calibrate") as progress:
        order = resolve(
            pair,
            verifier,
            draft,
            profile=profile,
            num_ctx=context,
            num_threads=threads,
            mode=AUTO,
            workers=workers,
            progress=progress,
        )
        owner = Owner()  # a Ctrl-C inside one of llama.cpp's callbacks would be lost
        devices = owner.submit(lambda: look_at_box(order.workers)).result().devices
        owner.stop()
        key = calibration.key_of(order.options, order.draft, order.profile, devices, threads)
        known = None if force else calibration.load(key)
        is_new = known is None or known.is_quick
        found = _measured(order, key, progress) if known is None or known.is_quick else known
    _show(found, key, is_new, as_json)


def _measured(order: Order, key: Key, progress: Progress) -> Calibration:
    """On a thread of its own: Ctrl-C then need not wait for a long verification."""
    from edgespec.owner import Owner

    owner, cancelled = Owner(), threading.Event()
    future = owner.submit(lambda: _load_and_measure(order, key, owner, progress, cancelled.is_set))
    try:
        return future.result()
    finally:
        cancelled.set()
        owner.stop()


def _load_and_measure(
    order: Order, key: Key, owner: Owner, progress: Progress, cancelled: abc.Callable[[], bool]
) -> Calibration:
    """Both models are placed and loaded as ``run`` would."""
    from contextlib import ExitStack
    from functools import partial

    from edgespec import calibration, opening, survey
    from edgespec.text.tokenizer import Tokenizer

    progress("load the verifier", 0.0)
    with ExitStack() as undo:
        opened = opening.Opening(order, owner, undo)
        opening.check_files(order)
        placement = opened.place(survey.look_at_box(order.workers), None)
        in_turn, at_once = _ways(order, placement)
        verifier = opened.open_verifier(placement, in_turn)
        tokenizer = Tokenizer(verifier.model)
        has_model = placement.drafter == "model"
        return calibration.calibrate(
            verifier,
            partial(opened.open_model, placement, verifier, tokenizer) if has_model else None,
            opened.draft_owner.submit,
            key,
            in_turn,
            at_once,
            usual=opening.usual_text(tokenizer),
            is_free=placement.drafter == "lookup",
            progress=progress,
            cancelled=cancelled,
        )


def _ways(order: Order, placement: Placement) -> tuple[Threads, tuple[Threads, ...]]:
    """Threads for taking turns, and for working at the same time."""
    from edgespec.devices.probe import usable_cpus
    from edgespec.devices.threads import split, splits
    from edgespec.opening import is_all_on_gpu

    sides = order.profile.verifier, order.profile.draft
    asked_verifier, asked_draft = (order.num_threads or side.threads or None for side in sides)
    shared: dict[str, Any] = {
        "verifier_on_gpu": is_all_on_gpu(placement),
        "draft_on_gpu": placement.draft_provider == "cuda",
        "asked_verifier": asked_verifier,
        "asked_draft": asked_draft,
    }
    return split(usable_cpus(), **shared), splits(usable_cpus(), **shared)


def _show(found: Calibration, key: Key, is_new: bool, as_json: bool) -> None:
    if as_json:
        print_json(found.as_dict() | {"path": str(key.path), "is_new": is_new})
        return
    click.echo("\n".join(_text(found)))
    if key.path.is_file():
        click.echo(f"kept in {key.path}{'' if is_new else '; --force measures anew'}", err=True)
    else:
        click.echo(f"{key.path} cannot be written, so this is measured anew next time", err=True)


# ---------------------------------------------------------------------------------------------------------- for people


def _text(found: Calibration) -> abc.Iterator[str]:
    curves = found.curves
    yield from _aligned(_verify_table(curves))
    yield ""
    lines: list[tuple[str, str]] = [
        (f"draft{'' if size == 1 else f', {size} sequences'}", f"{_ms(seconds)} ms a token")
        for size, seconds in zip(curves.batches, curves.step_s, strict=True)
    ]
    if curves.overlap is not None:
        lines.append(("both at once", f"verify {curves.overlap.verify:.2f} x, draft {curves.overlap.draft:.2f} x"))
    if found.received:
        num_accepted, num_judged = (sum(counts) for counts in zip(*(one[:2] for one in found.received), strict=True))
        lines.append(("accepted", f"{num_accepted} of {num_judged} drafted tokens of usual answers"))
    lines += [("threads", _threads(found)), ("plain", f"{_ms(found.plain_s)} ms a token")]
    lines += [("mode", f"{found.mode}: {found.reason}"), ("measured", found.measured_at)]
    width = max(len(name) for name, _ in lines)
    yield from (f"{name:{width}}  {value}" for name, value in lines)


def _verify_table(curves: Curves) -> list[list[str]]:
    """Milliseconds by rows and tokens in the cache, each over its cost relative to one row."""
    table = [["verify, ms", *(str(width) for width in curves.widths)]]
    for depth, row in zip(curves.depths, curves.verify_s, strict=True):
        table.append([f"after {depth}", *map(_ms, row)])
        table.append(["", *(f"{seconds / row[0]:.2f} x" for seconds in row)])
    return table


def _aligned(table: list[list[str]]) -> abc.Iterator[str]:
    sizes = [max(map(len, column)) for column in zip(*table, strict=True)]
    for first, *cells in table:
        numbers = (f"{cell:>{size}}" for cell, size in zip(cells, sizes[1:], strict=True))
        yield "  ".join([f"{first:{sizes[0]}}", *numbers])


def _threads(found: Calibration) -> str:
    threads = found.threads
    if not found.curves.batches:
        return f"verifier {threads.verifier}"
    how = "at the same time" if threads.together else "in turn"
    return f"verifier {threads.verifier}, draft {threads.draft}, {how}"


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g}"
