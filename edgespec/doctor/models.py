"""The two models: whether they are there and whole, fit each other, and fit the memory."""

from __future__ import annotations

import collections.abc as abc
import contextlib
import importlib.util
import json
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from edgespec import errors
from edgespec.devices.detect import unused_gpu
from edgespec.devices.gguf_sizes import parts
from edgespec.devices.memory import size_text
from edgespec.devices.placement import Wanted, place, wish
from edgespec.devices.run_budget import usable_gpus
from edgespec.devices.sizes import ModelShape
from edgespec.doctor.box import needs_gpu
from edgespec.doctor.finding import Finding, Status, ok, said
from edgespec.doctor.job import TRIAL_TIMEOUT_S, Case, child
from edgespec.doctor.software import CACHE_BYTES, check_space, check_survives
from edgespec.errors import BackendError, EdgespecError, MissingDependencyError, ModelNotFoundError, ProfileError
from edgespec.pairs import DEFAULT_PAIR, load_pair
from edgespec.pairs.pair import check_draft_files
from edgespec.pairs.sources import BuiltDraft
from edgespec.survey import draft_shape, verifier_shape
from edgespec.verifiers.llama_gguf import read_header

if TYPE_CHECKING:
    from edgespec.text.tokenizer import Tokenizer

TOOLKIT = ("onnx", "onnx_ir", "gguf")  # what building a draft model needs: the extra ``quantize``
NUM_CTX = 64  # the draft model is opened with so short a context: it costs next to nothing
PROMPT = "Say hello."


def pair(case: Case) -> abc.Iterator[Finding]:
    """The manifest, where there is one to read."""
    job = case.job
    if job.pair is None and job.verifier is not None:
        return
    case.pair = load_pair(DEFAULT_PAIR if job.pair is None else job.pair)
    yield ok("pair", f"{case.pair.name}: {case.pair.description}")


def verifier(case: Case) -> abc.Iterator[Finding]:
    """Its file or files, and whether llama.cpp can read them."""
    if case.job.verifier is None and case.pair is None:
        return
    path = _verifier_path(case)
    if case.llama:
        check_survives(path)
        read_header(path)
        case.verifier = verifier_shape(path)
    case.gguf = path
    yield ok("verifier", f"{path} ({size_text(sum(part.stat().st_size for part in parts(path)))}){_checked(case)}")


def _verifier_path(case: Case) -> Path:
    if case.job.verifier is None:
        found = case.known(case.pair).verifier
        path = found.find()
        if case.job.deep:
            found.check(path, case.progress)
        return path
    for part in parts(case.job.verifier):
        if not part.is_file():
            raise ModelNotFoundError(f"no verifier at {part}; give the path of a GGUF file")
    return case.job.verifier


def _checked(case: Case) -> str:
    return ", SHA-256 as the manifest says" if case.job.deep and case.job.verifier is None else ""


def draft(case: Case) -> abc.Iterator[Finding]:
    """Where it lies; one that is built on first use need not be there."""
    what, given, pair = "draft model", case.job.draft, case.pair
    if case.mode == "plain" or given == "none":
        case.draft = "none"
        yield ok(what, "none: plain decoding")
    elif given is None and pair is None and case.job.verifier is None:
        return
    elif given == "lookup" or (given is None and pair is None):
        case.draft = "lookup"
        yield ok(what, "prompt lookup")
    elif given is None and pair is not None and isinstance(pair.draft, BuiltDraft) and not pair.has_draft:
        yield from _to_be_built(case, pair.draft)
    else:
        case.draft = path = _draft_path(case)
        if case.job.deep:
            check_draft_files(path, "build or get the draft model again", case.progress)
        case.draft_shape = draft_shape(path)
        yield ok(what, f"{path} ({size_text(case.draft_shape.weights_bytes)})")


def _draft_path(case: Case) -> Path:
    given = case.job.draft
    if given is not None:
        if not Path(given).exists():
            raise ModelNotFoundError(
                f"no draft model at {given}; give a draft folder or an .onnx file, or: lookup, none"
            )
        return Path(given)
    pair = case.known(case.pair)
    return pair.draft_path if isinstance(pair.draft, BuiltDraft) else pair.draft.find()


def _to_be_built(case: Case, recipe: BuiltDraft) -> abc.Iterator[Finding]:
    """What building it takes: the toolkit, and room in the cache."""
    missing = [name for name in TOOLKIT if importlib.util.find_spec(name) is None]
    if missing:
        message = f"it is to be built, which needs {', '.join(missing)}; pip install 'edgespec[quantize]'"
        yield said("draft model", "problem", message, MissingDependencyError)
        return
    yield said("draft model", "note", "not built yet: the first run builds it, in some tens of seconds")
    if case.gguf is not None:
        # At most: a GGUF has four bits a weight or more, and a draft model of 8 a little more than those.
        num_bytes = case.gguf.stat().st_size * recipe.bits // 3
        case.draft_shape = ModelShape.of_file(num_bytes)
        yield check_space(num_bytes + CACHE_BYTES)


def disk(case: Case) -> Finding:
    """Where nothing is to be built: what edgespec notes for itself."""
    return check_space(CACHE_BYTES)


def tokenizer(case: Case) -> Finding:
    """The verifier's; and token by token the draft model's, which is opened for it where it is to run."""
    from edgespec.text.tokenizer import Tokenizer
    from edgespec.verifiers.llama_vocabulary import open_vocabulary

    with open_vocabulary(case.known(case.gguf)) as model:
        theirs = Tokenizer(model)
        if case.draft_model is None or case.providers is None:
            return ok("tokenizer", f"{theirs.num_vocab} tokens")
        provider = case.known(case.profile).draft.provider
        _compare(case.draft_model, theirs, provider)
    return ok("tokenizer", f"the draft model speaks the verifier's {theirs.num_vocab} tokens, and opens on {provider}")


def _compare(draft_model: Path, theirs: Tokenizer, provider: str) -> None:
    from edgespec.drafters import vocabulary
    from edgespec.drafters.onnx import OnnxDrafter

    drafter = OnnxDrafter.open(
        draft_model, num_ctx=NUM_CTX, num_threads=1, num_vocab=theirs.num_vocab, provider=provider
    )
    with contextlib.closing(drafter):
        vocabulary.check(drafter.tokens, theirs.tokens)


def context(case: Case) -> Finding:
    """Of the KV cache: its length and its types."""
    what, shape, profile = "context", case.known(case.verifier), case.known(case.profile)
    setup = wish(_wanted(case), profile, case.known(case.box)).plan.setup
    if not setup.cache_fits:
        message = (
            f"a KV cache of {setup.kv_type_k}/{setup.kv_type_v} has blocks that do not divide this verifier's heads of "
            f"{shape.head_size_k}; set [verifier] kv_type_k and kv_type_v to 'f16' in the profile"
        )
        return said(what, "problem", message, ProfileError)
    if setup.context > shape.num_ctx:
        message = f"{setup.context} tokens, and the verifier was trained on {shape.num_ctx}; give --context with less"
        return said(what, "note", message)
    return ok(what, f"{setup.context} tokens of at most {shape.num_ctx}, KV cache {setup.kv_type_k}/{setup.kv_type_v}")


def memory(case: Case) -> Finding:
    """Of all that is wanted, against what is free."""
    plan = wish(_wanted(case), case.known(case.profile), case.known(case.box)).plan
    plan.check()
    return ok("memory", ", ".join(" ".join(line.split()) for line in plan.text()[len(plan.lines) :]))


def placement(case: Case) -> abc.Iterator[Finding]:
    """What runs where, and every step down from what was wanted."""
    profile, box = case.known(case.profile), case.known(case.box)
    found = place(_wanted(case), profile, box)
    no_gpu = not (usable_gpus(profile, box) or unused_gpu(box) or needs_gpu(profile))
    for upper, lower, reason in found.steps:
        status: Status = "note" if no_gpu and (upper, lower) == ("hybrid", "one device") else "problem"
        yield said("placement", status, f"{lower} instead of {upper}: {reason}")
    if not found.steps:
        yield ok("placement", found.name)


def _wanted(case: Case) -> Wanted:
    return Wanted(
        case.known(case.verifier),
        case.draft_shape,
        lookup=case.draft != "none",
        mode=case.mode,
        context=case.job.context,
        providers=case.providers or (),
    )


def trial(case: Case) -> abc.Iterator[Finding]:
    """`edgespec run` itself, for a few tokens. Only with ``deep``."""
    if not case.job.deep:
        return
    what = "trial run"
    case.progress("answering a prompt", 0.0)
    try:
        done = child(
            ["-m", "edgespec", "run", *case.job.arguments(), "--max-tokens", "8", "--json", PROMPT], TRIAL_TIMEOUT_S
        )
    except subprocess.TimeoutExpired as error:
        yield said(what, "problem", f"no answer within {error.timeout:g} s; try a smaller model", BackendError)
        return
    if done.returncode:
        last = done.stderr.decode("utf-8", "replace").strip().splitlines()[-1:] or ["no message"]
        yield said(what, "problem", last[0].removeprefix("Error: "), _raised(done.returncode))
        return
    answer = json.loads(done.stdout)
    yield ok(what, f"{answer['completion_tokens']} tokens at {answer['tokens_per_s']:.1f} tokens/s, {answer['mode']}")


def _raised(exit_code: int) -> type[EdgespecError]:
    kinds: list[type[EdgespecError]] = [getattr(errors, name) for name in errors.__all__]
    return next((kind for kind in kinds if kind.exit_code == exit_code), BackendError)
