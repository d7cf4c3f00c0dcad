"""``edgespec quantize``: files for a device, and what each step cost. What is heavy is imported inside the commands."""

from __future__ import annotations

import collections.abc as abc
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from edgespec.cli.layers import layer_numbers
from edgespec.cli.output import json_option, print_json
from edgespec.cli.progress import bar
from edgespec.errors import FileAccessError

if TYPE_CHECKING:
    from edgespec.devices.profile import Profile
    from edgespec.devices.sizes import Budget
    from quantize.head import HeadChoice

MB = 1e6
_F = TypeVar("_F", bound=abc.Callable[..., Any])

PATH = click.Path(path_type=Path, readable=False)
COUNT = click.IntRange(min=1)
KEEPS = "[default: the profile's; a source that is quantized already and no larger is kept as it is]"


def _layers(_: click.Context, __: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    """``0,1,26-29`` as layers."""
    try:
        return None if value is None else layer_numbers(value)
    except (ValueError, OverflowError):
        raise click.BadParameter(f"got {value!r}; allowed: layers and ranges of them, as in 0,1,26-29") from None


def _options(*options: abc.Callable[[_F], _F]) -> abc.Callable[[_F], _F]:
    def add(command: _F) -> _F:
        for option in reversed(options):
            command = option(command)
        return command

    return add


FORCE = click.option("--force", is_flag=True, help="Replace what is there, if it is of the same kind.")
THREADS = click.option("--threads", metavar="N", type=COUNT, help="CPU threads.  [default: the usable CPUs]")
PROFILE = click.option("--profile", metavar="NAME", help="Take what is not given here from a device profile.")
HEAD = _options(
    click.option(
        "--head-vocab", metavar="N", type=click.IntRange(min=0),
        help="Let the draft propose the N most frequent ids only; 0: all.",
    ),
    click.option(
        "--corpus", metavar="FILE", type=PATH, multiple=True,
        help="Count ids on this text (repeatable).  [default: on text that the model writes itself]",
    ),
)  # fmt: skip
IMATRIX = click.option("--imatrix", metavar="FILE", type=PATH, help="Importance matrix of the model, for better files.")
REQUANTIZE = click.option("--requantize", is_flag=True, help="Accept a source that is quantized already.")


@click.group(invoke_without_command=True)
@click.pass_context
def quantize(ctx: click.Context) -> None:
    """Make the files a device should run, and say what they cost.

    Files appear whole or not at all, and sources are never written.
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


# --------------------------------------------------------------------------------------------------------------- draft


@quantize.command(short_help="Make an ONNX draft model of a GGUF or a checkpoint.")
@click.argument("source", type=PATH)
@click.option("--out", metavar="DIR", type=PATH, required=True, help="The draft's folder.")
@click.option("--bits", type=click.Choice(["4", "8", "32"]), help="Of a weight; 32 is unquantized.  [default: 8]")
@click.option(
    "--block-size", type=click.Choice(["16", "32", "64", "128"]), help="Inputs that share a scale.  [default: 32]"
)
@click.option("--layers", metavar="0,1,28-29", callback=_layers, help="Keep these layers only.")
@_options(HEAD, THREADS, PROFILE, json_option, FORCE)
def draft(
    source: Path,
    out: Path,
    bits: str | None,
    block_size: str | None,
    layers: tuple[int, ...] | None,
    head_vocab: int | None,
    corpus: tuple[Path, ...],
    threads: int | None,
    profile: str | None,
    as_json: bool,
    force: bool,
) -> None:
    """Make an ONNX draft model of SOURCE: a GGUF, or a checkpoint's folder with safetensors."""
    chosen = _profile(profile)
    from quantize.draft import build_draft
    from quantize.head import choose_head
    from quantize.pair import check_corpus, folder_bytes, num_head_ids, within
    from quantize.source import open_source

    num_bits, size = int(bits or chosen.draft.bits), int(block_size or chosen.draft.block_size)
    num_ids = num_head_ids(head_vocab, chosen, open_source(source).dimensions.num_vocab)
    check_corpus(corpus, head_vocab, chosen)
    _check_new(out, force)
    with bar("quantize draft") as progress:
        counting = within(progress, 0.0, 0.5, "head")
        head = choose_head(source, num_ids, corpus=corpus, num_threads=threads, progress=counting) if num_ids else None
        build_draft(
            source,
            out,
            bits=num_bits,
            block_size=size,
            layers=layers,
            head=head.ids if head else None,
            force=force,
            progress=within(progress, 0.5 if head else 0.0, 1.0, "draft"),
        )
    content = {"path": str(out), "size_bytes": folder_bytes(out), "bits": num_bits, "block_size": size}
    content |= {"layers": layers, "head_vocab": num_ids or None, "coverage": head.coverage if head else None}
    text = [f"{out}: draft model, {_mb(folder_bytes(out))}, {num_bits} bits", *_coverage(head)]
    _show(content, text, f"edgespec run --verifier VERIFIER.gguf --draft {shlex.quote(str(out))}", as_json)


# ------------------------------------------------------------------------------------------------------------ verifier


@quantize.command(short_help="Write a GGUF as a GGUF of another type.")
@click.argument("source", type=PATH)
@click.option("--out", metavar="FILE", type=PATH, required=True, help="The GGUF to write.")
@click.option("--type", "kind", metavar="TYPE", help="Such as Q4_K_M.  [default: the profile's]")
@_options(IMATRIX, REQUANTIZE, THREADS, PROFILE, json_option, FORCE)
def verifier(
    source: Path,
    out: Path,
    kind: str | None,
    imatrix: Path | None,
    requantize: bool,
    threads: int | None,
    profile: str | None,
    as_json: bool,
    force: bool,
) -> None:
    """Write SOURCE, a GGUF, as a GGUF of another type. llama.cpp does it."""
    if kind is None and profile is None:
        raise click.UsageError("nothing says what to make; give --type, such as --type Q4_K_M, or --profile")
    kind = (_profile(profile).verifier.gguf_type if kind is None else kind).upper()
    from quantize.verifier import quantize_verifier

    with bar("quantize verifier") as progress:
        quantize_verifier(
            source,
            out,
            kind,
            imatrix=imatrix,
            requantize=requantize,
            num_threads=threads,
            force=force,
            progress=progress,
        )
    size = out.stat().st_size
    content = {"path": str(out), "type": kind, "size_bytes": size}
    _show(content, [f"{out}: {kind}, {_mb(size)}"], f"edgespec run --verifier {shlex.quote(str(out))}", as_json)


# ---------------------------------------------------------------------------------------------------------------- pair


@quantize.command(short_help="Make a verifier and a draft that fit a device.")
@click.option("--verifier", metavar="GGUF", type=PATH, required=True, help="The big model; F16 or BF16 is best.")
@click.option("--draft", metavar="SOURCE", type=PATH, required=True, help="Its small sibling: a GGUF or a checkpoint.")
@click.option("--profile", metavar="NAME", required=True, help="The device the pair is for.")
@click.option("--out", metavar="DIR", type=PATH, required=True, help="The pair's folder.")
@click.option("--type", "kind", metavar="TYPE", help=f"GGUF type of the verifier.  {KEEPS}")
@_options(HEAD, IMATRIX, REQUANTIZE, THREADS, json_option, FORCE)
def pair(
    verifier: Path,
    draft: Path,
    profile: str,
    out: Path,
    kind: str | None,
    head_vocab: int | None,
    corpus: tuple[Path, ...],
    imatrix: Path | None,
    requantize: bool,
    threads: int | None,
    as_json: bool,
    force: bool,
) -> None:
    """Make a pair that fits a device: types by its profile, memory planned before any work."""
    chosen = _profile(profile)
    from edgespec.drafters.vocabulary import check
    from quantize.pair import PairOptions, build_pair

    options = PairOptions(kind, head_vocab, corpus, imatrix, requantize, threads)
    budget = _budget(chosen)
    with bar("quantize pair") as progress:
        made = build_pair(
            verifier,
            draft,
            chosen,
            out,
            budget=budget,
            check_tokens=check,
            options=options,
            force=force,
            progress=progress,
        )
    how = "as it was" if made.kept else "quantized"
    content = {"profile": chosen.name, **made.as_dict()}
    text = [
        *made.plan.text(),
        f"{out}: {made.verifier_type} verifier, {how}, {_mb(made.verifier_bytes)}; draft, {_mb(made.draft_bytes)}",
        *_coverage(made.head),
    ]
    if not chosen.device.memory_budget_gib:
        text.append("the profile leaves memory_budget_gib open: main memory is planned by this box's")
    _show(content, text, f"edgespec run --pair {shlex.quote(str(out))}", as_json)


def _budget(profile: Profile) -> Budget:
    """The profile's; what it leaves open is this box's."""
    from edgespec.devices.probe import probe
    from edgespec.devices.sizes import Budget
    from edgespec.verifiers.llama_devices import list_devices

    box = probe(devices=list_devices())
    return Budget.of(profile.device, box.memory_bytes, [gpu.memory_bytes for gpu in box.gpus])


# -------------------------------------------------------------------------------------------------------------- report


@quantize.command(short_help="Say what a model lost, and what it takes.")
@click.argument("subject", metavar="PAIR|FILE")
@click.option("--against", metavar="SOURCE", type=PATH, required=True, help="The model that is right by definition.")
@click.option(
    "--text", metavar="FILE", type=PATH, help="Compare on this text.  [default: a few texts of edgespec's own]"
)
@click.option("--max-tokens", metavar="N", type=COUNT, default=2000, show_default=True)
@_options(THREADS, PROFILE, json_option)
def report(
    subject: str,
    against: Path,
    text: Path | None,
    max_tokens: int,
    threads: int | None,
    profile: str | None,
    as_json: bool,
) -> None:
    """Say what a model lost: top-1 agreement with SOURCE, KL, perplexity of both, size, time per token.

    Of a pair, the draft is compared with SOURCE (the agreement predicts its acceptance), and so is the verifier when
    SOURCE is a GGUF of the same model.
    """
    num_threads = threads or _profile(profile).draft.threads or None
    from edgespec.agreement import compare

    reports = {}
    for part, path in _parts(subject, against).items():
        with bar(f"report {part}") as progress:
            reports[part] = compare(
                path, against, texts=text, max_tokens=max_tokens, num_threads=num_threads, progress=progress
            )
    content = {part: found.as_dict() for part, found in reports.items()}
    _show(content, [line for found in reports.values() for line in found.lines()], None, as_json)


def _parts(subject: str, against: Path) -> dict[str, Path]:
    """What is to be compared, by what it is in a pair: "draft" and "verifier"; a file alone is the "model"."""
    from edgespec.pairs import MANIFEST, load_pair

    path = Path(subject)
    if path.suffix in (".gguf", ".onnx") or (path.is_dir() and not (path / MANIFEST).is_file()):
        return {"model": path}
    chosen = load_pair(subject)
    verifier = chosen.verifier.find()
    with bar("report") as progress:
        found = {"draft": chosen.ensure_draft(progress)}
    return found | ({"verifier": verifier} if _same_model(verifier, against) else {})


def _same_model(verifier: Path, source: Path) -> bool:
    """Whether both GGUFs hold the same model, of whatever type."""
    if not source.is_file():
        return False
    from quantize.gguf_shape import read_gguf

    ours, theirs = read_gguf(verifier), read_gguf(source)
    sizes = ("num_kv_heads", "num_heads", "width", "num_hidden", "num_vocab")
    same = all(getattr(ours.shape, size) == getattr(theirs.shape, size) for size in sizes)
    return same and ours.architecture == theirs.architecture


# ------------------------------------------------------------------------------------------------------------- helpers


def _profile(name: str | None) -> Profile:
    from edgespec.devices.profile import Profile, load_profile

    return Profile("default") if name is None else load_profile(name)


def _check_new(out: Path, force: bool) -> None:
    """Before minutes of work, what build_draft would say after them."""
    if out.exists() and not force:
        raise FileAccessError(f"{out} exists; choose another folder, or replace it with --force")


def _coverage(head: HeadChoice | None) -> list[str]:
    if head is None:
        return []
    return [f"head of {len(head.ids)} ids: they are {head.coverage:.1%} of {head.num_counted} tokens"]


def _mb(num_bytes: int) -> str:
    return f"{num_bytes / MB:.1f} MB"


def _show(content: dict[str, Any], text: list[str], next_command: str | None, as_json: bool) -> None:
    """The JSON object on standard output; or the text there, and what to do next on standard error."""
    if as_json:
        print_json(content)
        return
    click.echo("\n".join(text))
    if next_command:
        click.echo(f"run it with: {next_command}", err=True)
