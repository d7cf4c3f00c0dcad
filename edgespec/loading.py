"""The composition root: ``load`` wires a verifier, a drafter and the text layer into a Runtime."""

from __future__ import annotations

from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path

from edgespec.core.policy import DEFAULT_POLICY, Policy
from edgespec.devices.probe import usable_cpus
from edgespec.drafters import vocabulary
from edgespec.drafters.base import Drafter
from edgespec.drafters.lookup import LookupDrafter
from edgespec.errors import EdgespecError, ModelFormatError, ModelNotFoundError
from edgespec.owner import Owner
from edgespec.pairs import DEFAULT_PAIR, Progress, load_pair
from edgespec.paths import cache_dir
from edgespec.runtime import Mode, Runtime, check_mode
from edgespec.text.tokenizer import Tokenizer
from edgespec.verifiers.canary import use_extra_bufts
from edgespec.verifiers.llama import LlamaOptions, LlamaVerifier


def load(
    pair: str | None = None,
    verifier: str | Path | None = None,
    draft: str | Path | None = None,
    *,
    num_ctx: int | None = None,
    num_threads: int | None = None,
    mode: Mode = "sequential",
    policy: Policy = DEFAULT_POLICY,
    progress: Progress | None = None,
) -> Runtime:
    """Load a pair, or a verifier and a draft of your own, and return a Runtime. Blocks; any thread.

    pair         name of a manifest; "starter" when neither it nor a verifier is given
    verifier     path of a GGUF; replaces the pair's
    draft        "lookup", "none", or the path of a draft folder or ONNX file; replaces the pair's. With a verifier and
                 neither pair nor draft: "lookup"
    num_ctx      most tokens of prompt and answer together; None: what the verifier was trained for, at most 4096
    num_threads  for either side; None: the usable CPUs
    mode, policy  what requests get that do not say otherwise
    progress     called with (stage, 0..1) while a draft model is built on first use

    Raises UnknownPairError, ModelNotFoundError, ModelFormatError, FileAccessError, VocabularyMismatchError,
    ParameterError, BackendError, MissingDependencyError.
    """
    check_mode(mode)
    chosen = load_pair(DEFAULT_PAIR if pair is None else pair) if pair is not None or verifier is None else None
    path = chosen.verifier.find() if verifier is None and chosen is not None else Path(verifier or "")
    if draft is None:
        draft = "lookup" if chosen is None else chosen.ensure_draft(progress)
    num_threads = usable_cpus() if num_threads is None else num_threads
    owner = Owner()
    future = owner.submit(lambda: _load(path, draft, num_ctx, num_threads, mode, policy, owner))
    try:
        return future.result()
    except (ModelFormatError, ModelNotFoundError) as error:
        owner.stop()
        if chosen is not None and str(chosen.draft_path) in str(error):
            raise type(error)(f"{error}; delete {chosen.draft_path} to have it built anew") from error
        raise
    except BaseException:
        # On Ctrl-C the load itself goes on: what it comes to must be freed.
        future.add_done_callback(_discard)
        owner.stop()
        raise


def _discard(future: Future[Runtime]) -> None:
    if future.exception() is None:
        future.result().close()


def _load(
    verifier_path: Path,
    draft: str | Path,
    num_ctx: int | None,
    num_threads: int,
    mode: Mode,
    policy: Policy,
    owner: Owner,
) -> Runtime:
    """On the owner thread: both models, then the check that they speak the same tokens."""
    with ExitStack() as undo:
        extra = use_extra_bufts(cache_dir())
        verifier = LlamaVerifier(LlamaOptions(verifier_path, num_threads, num_ctx=num_ctx, use_extra_bufts=extra))
        undo.callback(verifier.close)
        tokenizer = Tokenizer(verifier.model)
        drafter = _open_drafter(draft, verifier, tokenizer, num_threads)
        if drafter is not None:
            undo.callback(drafter.close)
        runtime = Runtime(
            verifier,
            drafter,
            tokenizer,
            mode=mode,
            policy=policy,
            verifier_name=verifier_path.name,
            draft_name=Path(draft).name,
            owner=owner,
        )
        undo.pop_all()
        return runtime


def _open_drafter(draft: str | Path, verifier: LlamaVerifier, tokenizer: Tokenizer, num_threads: int) -> Drafter | None:
    if draft == "none":
        return None
    if draft == "lookup":
        return LookupDrafter()
    if not Path(draft).exists():
        raise ModelNotFoundError(f"no draft model at {draft}; give a draft folder or an .onnx file, or: lookup, none")
    from edgespec.drafters.onnx import OnnxDrafter

    drafter = OnnxDrafter.open(draft, num_ctx=verifier.num_ctx, num_threads=num_threads, num_vocab=tokenizer.num_vocab)
    try:
        vocabulary.check(drafter.tokens, tokenizer.tokens)
    except EdgespecError:
        drafter.close()
        raise
    return drafter
