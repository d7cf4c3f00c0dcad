"""The composition root: ``load`` wires a verifier, a drafter and the text layer into a Runtime."""

from __future__ import annotations

import collections.abc as abc
import threading
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Literal, cast

from edgespec.core.check import check_int
from edgespec.core.policy import DEFAULT_POLICY, Fixed, Policy, Threshold
from edgespec.devices.profile import Profile, load_profile, read_profile
from edgespec.errors import ModelFormatError, ModelNotFoundError, ParameterError, ProfileError
from edgespec.opening import Order, open_runtime
from edgespec.owner import Owner
from edgespec.pairs import DEFAULT_PAIR, Pair, Progress, load_pair
from edgespec.runtime import MODES, Mode, Runtime
from edgespec.verifiers.llama import LlamaOptions
from edgespec.verifiers.llama_options import MAX_THREADS
from edgespec.verifiers.llama_rpc import check_reachable, check_supported, parse_endpoints

NO_PROFILE = Profile("none")  # all defaults
PROFILE = "profile.toml"  # in a pair's folder: what it was planned for
AUTO = "auto"
# Measured on a draft model that is the verifier at 8 bits (tests/bench/LOG.md): nearly all that is rejected was drawn
# with a lead of less than this, which is what rounding moves a logit.
MIN_CONFIDENCE = 0.3


def load(
    pair: str | None = None,
    verifier: str | Path | None = None,
    draft: str | Path | None = None,
    *,
    profile: str | Profile | None = None,
    num_ctx: int | None = None,
    num_slots: int = 1,
    num_threads: int | None = None,
    mode: Mode | Literal["auto"] | None = None,
    policy: Policy | None = None,
    workers: abc.Iterable[str] = (),
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
    num_slots    requests served at once, each with a context of its own
    num_threads  for either side; None: the usable CPUs, or fewer if the profile says so
    mode         what requests get that do not say otherwise; "auto", the default: what pays on this box, which is
                 measured for three seconds where ``edgespec calibrate`` has not. None: the profile's, but a draft that
                 is named is tried
    policy       how long drafts are; None: the profile's, which is Goodput
    workers      ``host:port`` of RPC workers whose devices the verifier may use too
    progress     called with (stage, 0..1) while a draft model is built on first use

    ``Runtime.degraded`` says what could not be had as it was meant. Raises UnknownPairError, ModelNotFoundError,
    ModelFormatError, FileAccessError, VocabularyMismatchError, ParameterError, ProfileError, BackendError,
    MissingDependencyError.
    """
    order = resolve(
        pair,
        verifier,
        draft,
        profile=profile,
        num_ctx=num_ctx,
        num_slots=num_slots,
        num_threads=num_threads,
        mode=mode,
        policy=policy,
        workers=workers,
        progress=progress,
    )
    return _open(order, _choose_pair(pair, verifier))


def resolve(
    pair: str | None,
    verifier: str | Path | None,
    draft: str | Path | None,
    *,
    profile: str | Profile | None = None,
    num_ctx: int | None = None,
    num_slots: int = 1,
    num_threads: int | None = None,
    mode: str | None = None,
    policy: Policy | None = None,
    workers: abc.Iterable[str] = (),
    progress: Progress | None = None,
) -> Order:
    """What ``load`` would open, given the same; a draft model that is not there is built. Raises as ``load`` does."""
    chosen = _choose_pair(pair, verifier)
    device = profile if isinstance(profile, Profile) else choose_profile(profile, pair, verifier)
    wanted = _check_mode(profiled_mode(device, draft) if mode is None else mode)
    workers = tuple(workers) or device.verifier.rpc
    _check_workers(workers)
    if num_threads is not None:
        check_int("num_threads", num_threads, 1, MAX_THREADS)
    path = chosen.verifier.find() if verifier is None and chosen is not None else Path(verifier or "")
    is_own = draft is not None
    if wanted == "plain":
        draft = "none"
    elif draft is None:
        draft = "lookup" if chosen is None else chosen.ensure_draft(progress)
    policy = profiled_policy(device) if policy is None else policy
    options = _verifier_options(path, device, num_ctx, num_slots)
    return Order(options, draft, is_own, device, policy, wanted, num_threads, workers)


def profiled_mode(device: Profile, draft: str | Path | None) -> str:
    """A draft that is asked for is tried, whatever the profile says."""
    mode = device.speculation.mode
    return AUTO if mode == "plain" and draft not in (None, "none") else mode


def _open(order: Order, chosen: Pair | None) -> Runtime:
    owner, cancelled = Owner(), threading.Event()
    future = owner.submit(lambda: open_runtime(order, owner, cancelled.is_set))
    try:
        return future.result()
    except (ModelFormatError, ModelNotFoundError) as error:
        owner.stop()
        if chosen is not None and str(chosen.draft_path) in str(error):
            raise type(error)(f"{error}; {chosen.draft_remedy}") from error
        raise
    except BaseException:
        # On Ctrl-C the load itself goes on, measuring excepted: what it comes to must be freed.
        cancelled.set()
        future.add_done_callback(_discard)
        owner.stop()
        raise


def _check_workers(workers: abc.Iterable[str]) -> None:
    """Before anything is built or loaded."""
    endpoints = parse_endpoints(workers)
    if endpoints:
        check_supported()
        check_reachable(endpoints)


def _check_mode(mode: str) -> Mode | None:
    if mode not in (AUTO, *MODES):
        raise ParameterError(f"mode: got {mode!r}; allowed: {', '.join((AUTO, *MODES))}")
    return None if mode == AUTO else cast(Mode, mode)


def profiled_policy(device: Profile) -> Policy:
    """The policy a profile names."""
    length = device.speculation.num_candidates
    if device.speculation.policy == "goodput":
        return DEFAULT_POLICY
    return Fixed(length, MIN_CONFIDENCE) if device.speculation.policy == "fixed" else Threshold(min(max(length, 3), 8))


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


def _verifier_options(path: Path, device: Profile, num_ctx: int | None, num_slots: int) -> LlamaOptions:
    chosen = device.verifier
    return LlamaOptions(
        path,
        num_threads=1,
        num_ctx=num_ctx,
        max_ctx=device.serving.context,
        num_slots=num_slots,
        num_gpu_layers=chosen.gpu_layers,
        flash_attention={"auto": None, "on": True, "off": False}[chosen.flash_attention],
        kv_type_k=chosen.kv_type_k,
        kv_type_v=chosen.kv_type_v,
        split_mode=chosen.split_mode,
        tensor_split=chosen.tensor_split,
        main_gpu=chosen.main_gpu,
    )
