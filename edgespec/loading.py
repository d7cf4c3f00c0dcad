"""The composition root: ``load`` wires a verifier, a drafter and the text layer into a Runtime."""

from __future__ import annotations

from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import cast

from edgespec.core.policy import DEFAULT_POLICY, Fixed, Policy
from edgespec.devices.probe import usable_cpus, usable_threads
from edgespec.devices.profile import Profile, load_profile, read_profile
from edgespec.drafters import vocabulary
from edgespec.drafters.base import Drafter
from edgespec.drafters.lookup import LookupDrafter
from edgespec.errors import EdgespecError, ModelFormatError, ModelNotFoundError, ProfileError
from edgespec.owner import Owner
from edgespec.pairs import DEFAULT_PAIR, Pair, Progress, load_pair
from edgespec.paths import cache_dir
from edgespec.runtime import Mode, Runtime, check_mode
from edgespec.text.tokenizer import Tokenizer
from edgespec.verifiers.canary import use_extra_bufts
from edgespec.verifiers.llama import LlamaOptions, LlamaVerifier

NO_PROFILE = Profile("none")  # all defaults
PROFILE = "profile.toml"  # in a pair's folder: what it was planned for


def load(
    pair: str | None = None,
    verifier: str | Path | None = None,
    draft: str | Path | None = None,
    *,
    profile: str | Profile | None = None,
    num_ctx: int | None = None,
    num_threads: int | None = None,
    mode: Mode | None = None,
    policy: Policy | None = None,
    progress: Progress | None = None,
) -> Runtime:
    """Load a pair, or a verifier and a draft of your own, and return a Runtime. Blocks; any thread.

    pair         name of a manifest; "starter" when neither it nor a verifier is given
    verifier     path of a GGUF; replaces the pair's
    draft        "lookup", "none", or the path of a draft folder or ONNX file; replaces the pair's. With a verifier and
                 neither pair nor draft: "lookup"
    profile      name or path of a device profile (or one that is loaded), for all that is not said here; None: the one
                 the pair was made for, else the defaults of Profile, which are those named below
    num_ctx      most tokens of prompt and answer together; None: what the verifier was trained for, at most the
                 profile's context (4096)
    num_threads  for either side; None: the usable CPUs, or fewer if the profile says so
    mode, policy  what requests get that do not say otherwise; None: sequential, DEFAULT_POLICY
    progress     called with (stage, 0..1) while a draft model is built on first use

    Raises UnknownPairError, ModelNotFoundError, ModelFormatError, FileAccessError, VocabularyMismatchError,
    ParameterError, ProfileError, BackendError, MissingDependencyError.
    """
    chosen = _choose_pair(pair, verifier)
    device = profile if isinstance(profile, Profile) else choose_profile(profile, pair, verifier)
    mode = check_mode(cast(Mode, device.speculation.mode) if mode is None else mode)
    policy = Fixed(device.speculation.num_candidates, DEFAULT_POLICY.min_confidence) if policy is None else policy
    path = chosen.verifier.find() if verifier is None and chosen is not None else Path(verifier or "")
    if draft is None:
        draft = "lookup" if chosen is None else chosen.ensure_draft(progress)
    options = _verifier_options(path, device, num_ctx, num_threads)
    draft_threads = _threads(num_threads, device.draft.threads)
    owner = Owner()
    future = owner.submit(lambda: _load(options, draft, draft_threads, device.draft.provider, mode, policy, owner))
    try:
        return future.result()
    except (ModelFormatError, ModelNotFoundError) as error:
        owner.stop()
        if chosen is not None and str(chosen.draft_path) in str(error):
            raise type(error)(f"{error}; {chosen.draft_remedy}") from error
        raise
    except BaseException:
        # On Ctrl-C the load itself goes on: what it comes to must be freed.
        future.add_done_callback(_discard)
        owner.stop()
        raise


def _choose_pair(pair: str | None, verifier: str | Path | None) -> Pair | None:
    return load_pair(DEFAULT_PAIR if pair is None else pair) if pair is not None or verifier is None else None


def choose_profile(profile: str | None, pair: str | None = None, verifier: str | Path | None = None) -> Profile:
    """The profile of that name or path; without one the pair's, from its folder or by its name; else the defaults.

    pair, verifier  as for ``load``
    """
    if profile is not None:
        return load_profile(profile)
    made_for = _choose_pair(pair, verifier)
    if made_for is None or not made_for.profile:
        return NO_PROFILE
    own = made_for.manifest.with_name(PROFILE)
    try:
        return replace(read_profile(own), name=made_for.profile) if own.is_file() else load_profile(made_for.profile)
    except ProfileError as error:
        message = f"the pair {made_for.name} is made for profile {made_for.profile}: {error}, or give another one"
        raise ProfileError(message) from error


def _discard(future: Future[Runtime]) -> None:
    if future.exception() is None:
        future.result().close()


def _threads(asked: int | None, profiled: int) -> int:
    """What was asked for, else the profile's number, which a container may be too small for."""
    return min(profiled or usable_cpus(), usable_cpus()) if asked is None else usable_threads(asked)


def _verifier_options(path: Path, device: Profile, num_ctx: int | None, num_threads: int | None) -> LlamaOptions:
    chosen = device.verifier
    return LlamaOptions(
        path,
        _threads(num_threads, chosen.threads),
        num_ctx=num_ctx,
        max_ctx=device.serving.context,
        num_gpu_layers=chosen.gpu_layers,
        flash_attention={"auto": None, "on": True, "off": False}[chosen.flash_attention],
        kv_type_k=chosen.kv_type_k,
        kv_type_v=chosen.kv_type_v,
        split_mode=chosen.split_mode,
        tensor_split=chosen.tensor_split,
        main_gpu=chosen.main_gpu,
    )


def _load(
    options: LlamaOptions,
    draft: str | Path,
    draft_threads: int,
    provider: str,
    mode: Mode,
    policy: Policy,
    owner: Owner,
) -> Runtime:
    """On the owner thread: both models, then the check that they speak the same tokens."""
    with ExitStack() as undo:
        verifier = LlamaVerifier(replace(options, use_extra_bufts=use_extra_bufts(cache_dir())))
        undo.callback(verifier.close)
        tokenizer = Tokenizer(verifier.model)
        drafter = _open_drafter(draft, verifier, tokenizer, draft_threads, provider)
        if drafter is not None:
            undo.callback(drafter.close)
        runtime = Runtime(
            verifier,
            drafter,
            tokenizer,
            mode=mode,
            policy=policy,
            verifier_name=options.path.name,
            draft_name=Path(draft).name,
            owner=owner,
        )
        undo.pop_all()
        return runtime


def _open_drafter(
    draft: str | Path, verifier: LlamaVerifier, tokenizer: Tokenizer, num_threads: int, provider: str
) -> Drafter | None:
    if draft == "none":
        return None
    if draft == "lookup":
        return LookupDrafter()
    if not Path(draft).exists():
        raise ModelNotFoundError(f"no draft model at {draft}; give a draft folder or an .onnx file, or: lookup, none")
    from edgespec.drafters.onnx import OnnxDrafter

    drafter = OnnxDrafter.open(
        draft,
        num_ctx=verifier.num_ctx,
        num_threads=num_threads,
        num_vocab=tokenizer.num_vocab,
        provider=provider,
    )
    try:
        vocabulary.check(drafter.tokens, tokenizer.tokens)
    except EdgespecError:
        drafter.close()
        raise
    return drafter
