"""Opening a pair: places it, loads both models, measures what rounds cost where nobody knows, and picks what pays.

``open_runtime`` runs on the thread that will own the verifier.
"""

from __future__ import annotations

import logging
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from edgespec import calibration, survey
from edgespec.calibration import Calibration, Key
from edgespec.core.costs import Curves
from edgespec.core.policy import Fixed, Policy, Threshold
from edgespec.core.sequence import Cancelled, never
from edgespec.degraded import Degraded
from edgespec.devices.placement import Placement, Wanted, lower, place, step_down
from edgespec.devices.probe import Box, usable_cpus, usable_threads
from edgespec.devices.profile import Profile
from edgespec.devices.threads import Threads, pin, places, split
from edgespec.drafters import vocabulary
from edgespec.drafters.base import Drafter
from edgespec.drafters.combined import CombinedDrafter
from edgespec.drafters.lookup import LookupDrafter
from edgespec.engine.draft_thread import NAME as DRAFT_THREAD
from edgespec.errors import (
    BackendError,
    MissingDependencyError,
    ModelNotFoundError,
    PromptError,
    VocabularyMismatchError,
)
from edgespec.owner import Owner
from edgespec.paths import cache_dir
from edgespec.runtime import Mode, Runtime
from edgespec.text.tokenizer import Tokenizer
from edgespec.verifiers.base import Verifier
from edgespec.verifiers.canary import use_extra_bufts
from edgespec.verifiers.fallback import FallbackVerifier, Place
from edgespec.verifiers.isolated import IsolatedVerifier
from edgespec.verifiers.llama import LlamaOptions, LlamaVerifier, check_file
from edgespec.verifiers.llama_vocabulary import Vocabulary

logger = logging.getLogger("edgespec")

NO_MODEL = ("lookup", "none")
UNUSABLE = (VocabularyMismatchError, BackendError, MissingDependencyError)


@dataclass(frozen=True, slots=True)
class Order:
    """What was asked for, resolved.

    options   the verifier's; threads and layers on the GPU are decided here
    draft     "lookup", "none", or the path of a draft model
    is_own    the draft was named by the caller: what is wrong with it is an error, and no reason to do without
    mode      None: what pays
    workers   ``host:port`` of RPC workers
    """

    options: LlamaOptions
    draft: str | Path
    is_own: bool
    profile: Profile
    policy: Policy
    mode: Mode | None
    num_threads: int | None
    workers: tuple[str, ...]

    @property
    def has_model(self) -> bool:
        return self.draft not in NO_MODEL

    @property
    def needs_costs(self) -> bool:
        """Whether anything is decided by what rounds cost."""
        return self.draft != "none" and (self.mode is None or not isinstance(self.policy, (Fixed, Threshold)))


def open_runtime(order: Order, owner: Owner, cancelled: Cancelled = never) -> Runtime:
    """On the owner's thread. Raises what loading raises, and Interrupted if ``cancelled`` says so while rounds are
    measured; nothing stays open then."""
    with ExitStack() as undo:
        runtime = Opening(order, owner, undo, cancelled).open()
        undo.pop_all()
        return runtime


class Opening:
    """One pair on its way.

    placement  what runs where, by what is known so far; from ``place`` on
    """

    def __init__(self, order: Order, owner: Owner, undo: ExitStack, cancelled: Cancelled = never) -> None:
        self.order, self.owner, self.undo, self.cancelled = order, owner, undo, cancelled
        self.degraded = Degraded()
        self.draft_owner = self._new_draft_owner()

    def _new_draft_owner(self) -> Owner:
        owner = Owner(DRAFT_THREAD)
        self.undo.callback(owner.stop)
        return owner

    def open(self) -> Runtime:
        order = self.order
        check_files(order)
        box = survey.look_at_box(order.workers)
        found = self._known(box)
        placement = self.place(box, found)
        threads = self._threads(placement, found)
        self._pin(threads)
        verifier = self.open_verifier(placement, threads)
        tokenizer = Tokenizer(verifier.model)
        drafter = self._open_drafter(verifier, tokenizer, threads)
        if found is None and drafter is not None and order.needs_costs:
            found, drafter = self._measure(verifier, drafter, tokenizer, threads, box)
        if drafter is None:
            self.draft_owner.stop()
        return Runtime(
            verifier,
            self._combined(drafter),
            tokenizer,
            mode=order.mode or ("sequential" if found is None or not _is_model(drafter) else found.mode),
            policy=order.policy,
            curves=_curves(found, drafter),
            received=found.received if found is not None and _is_model(drafter) else (),
            degraded=self.degraded,
            max_ahead=order.profile.speculation.max_speculative_steps,
            placement=self.placement.name,
            verifier_name=order.options.path.name,
            draft_name=_draft_name(order.draft, drafter),
            owner=self.owner,
            draft_owner=self.draft_owner,
        )

    # Where

    def _known(self, box: Box) -> Calibration | None:
        return calibration.load(self.key(box)) if self.order.needs_costs else None

    def key(self, box: Box) -> Key:
        order = self.order
        return calibration.key_of(order.options, order.draft, order.profile, box.devices, order.num_threads)

    def place(self, box: Box, found: Calibration | None) -> Placement:
        order, options = self.order, self.order.options
        wanted = Wanted(
            survey.verifier_shape(options.path),
            survey.draft_shape(Path(order.draft)) if order.has_model else None,
            lookup=order.draft != "none",
            mode=order.mode or "auto",
            context=options.num_ctx,
            num_slots=options.num_slots,
            providers=survey.draft_providers(order.profile, box),
            gain=min(found.gain, 1.0) if found is not None and found.mode == "plain" else None,
        )
        self.placement = place(wanted, order.profile, box)
        for step in self.placement.steps:
            self.degraded.add(*step)
        return self.placement

    def _step_down(self, lower: Placement, reason: str) -> None:
        self.degraded.add(*step_down(self.placement, lower, reason))
        self.placement = lower

    def _threads(self, placement: Placement, found: Calibration | None) -> Threads:
        """As calibrated for the mode that runs; else by the rule."""
        order = self.order
        if found is not None and order.mode in (None, found.mode) and _drafts(placement):
            return found.threads
        said = None if order.num_threads is None else usable_threads(order.num_threads)
        asked_verifier, asked_draft = (
            said or side.threads or None for side in (order.profile.verifier, order.profile.draft)
        )
        on_gpu = is_all_on_gpu(placement)
        return split(
            usable_cpus(),
            verifier_on_gpu=on_gpu,
            draft_on_gpu=placement.draft_provider == "cuda",
            together=order.mode == "overlapped" or (order.mode is None and on_gpu),
            asked_verifier=asked_verifier,
            asked_draft=asked_draft,
        )

    def _pin(self, threads: Threads) -> None:
        """Before either backend starts threads, which stay where the thread is that starts them."""
        cpus = places(threads) if self.order.profile.speculation.pin else None
        if cpus is not None:
            pin(cpus[0])
            self.draft_owner.submit(lambda: pin(cpus[1])).result()

    # Both models

    def open_verifier(self, placement: Placement, threads: Threads) -> FallbackVerifier:
        order = self.order
        options = replace(order.options, num_threads=threads.verifier, use_extra_bufts=use_extra_bufts(cache_dir()))
        below = [] if order.workers else lower(placement)
        places = [Place(where.name, partial(self._open_at, where, options)) for where in (placement, *below)]
        verifier = FallbackVerifier(places, self.degraded, Vocabulary(options.path))
        self.undo.callback(verifier.close)
        return verifier

    def _open_at(self, placement: Placement, options: LlamaOptions) -> Verifier:
        """Without layers on a GPU it is not to be touched at all, or it would keep some memory there."""
        layers = placement.num_gpu_layers
        options = replace(options, num_gpu_layers=layers, devices=options.devices if layers else ())
        is_isolated = self.order.workers or self.order.profile.verifier.isolate
        verifier = IsolatedVerifier(options, self.order.workers) if is_isolated else LlamaVerifier(options)
        self.placement = replace(self.placement, num_gpu_layers=layers)
        return verifier

    def _open_drafter(self, verifier: FallbackVerifier, tokenizer: Tokenizer, threads: Threads) -> Drafter | None:
        """What was placed; in mode auto lookup instead of a model of the pair's that cannot be used."""
        placement, owner = self.placement, self.draft_owner
        if placement.drafter != "model":
            return LookupDrafter(verifier.num_slots) if placement.drafter == "lookup" else None
        try:
            drafter: Drafter = owner.submit(lambda: self.open_model(placement, verifier, tokenizer, threads)).result()
        except UNUSABLE as error:
            if placement.draft_provider != "cpu" and not isinstance(error, VocabularyMismatchError):
                self._step_down(replace(placement, draft_provider="cpu"), str(error))
                return self._open_drafter(verifier, tokenizer, threads)
            if self.order.is_own or self.order.mode is not None:
                raise
            return self._look_up(verifier, str(error))
        self.undo.callback(lambda: owner.submit(drafter.close))
        return drafter

    def open_model(self, placement: Placement, verifier: Verifier, tokenizer: Tokenizer, threads: Threads) -> Drafter:
        """On the drafter's thread."""
        from edgespec.drafters.onnx import OnnxDrafter

        drafter = OnnxDrafter.open(
            self.order.draft,
            num_ctx=verifier.num_ctx,
            num_threads=threads.draft,
            num_slots=verifier.num_slots,
            num_vocab=tokenizer.num_vocab,
            spin=threads.spin,
            provider=placement.draft_provider,
        )
        try:
            vocabulary.check(drafter.tokens, tokenizer.tokens)
        except BaseException:
            drafter.close()
            raise
        return drafter

    def _look_up(self, verifier: Verifier, reason: str) -> Drafter:
        self._step_down(replace(self.placement, drafter="lookup", draft_provider="cpu"), reason)
        return LookupDrafter(verifier.num_slots)

    def _combined(self, drafter: Drafter | None) -> Drafter | None:
        """Where a text repeats itself, lookup is cheaper than a model and surer; not before a model was measured."""
        if drafter is None or not _is_model(drafter):
            return drafter
        lost = partial(self.degraded.add, "the draft model", "lookup")
        return CombinedDrafter(drafter, LookupDrafter(drafter.num_slots), lost)

    # What pays

    def _measure(
        self, verifier: FallbackVerifier, drafter: Drafter, tokenizer: Tokenizer, threads: Threads, box: Box
    ) -> tuple[Calibration | None, Drafter]:
        """The quick calibration; a model that does not pay makes way for lookup. None where it fails: what rounds cost
        is then learned as they run."""
        key = self.key(box)
        if not _is_model(drafter):
            key = replace(key, draft="lookup")
        try:
            found = self._known_of_lookup(key)
            if found is None:
                logger.info("measuring what rounds cost on this box, once; `edgespec calibrate` does so thoroughly")
                found = calibration.quick(
                    verifier,
                    drafter,
                    self.draft_owner.submit,
                    key,
                    threads,
                    usual=usual_text(tokenizer),
                    cancelled=self.cancelled,
                )
        except BackendError as error:
            logger.warning("what rounds cost could not be measured: %s", error)
            return None, drafter
        if self.order.mode is not None or found.mode != "plain" or not _is_model(drafter):
            return found, drafter
        self.draft_owner.submit(drafter.close)
        self.draft_owner.stop()
        self.draft_owner = self._new_draft_owner()  # a model that hangs is not to hold lookup up
        return found, self._look_up(verifier, found.reason)

    def _known_of_lookup(self, key: Key) -> Calibration | None:
        """Where it drafts instead of a model."""
        return calibration.load(key) if self.order.has_model and key.draft == "lookup" else None


def usual_text(tokenizer: Tokenizer) -> calibration.Usual | None:
    """None for a model whose chat template cannot be used, which whoever asks it something is told."""
    try:
        return calibration.usual(tokenizer)
    except PromptError:
        return None


def check_files(order: Order) -> None:
    """Before anything is loaded."""
    check_file(order.options.path)
    if order.has_model and not Path(order.draft).exists():
        raise ModelNotFoundError(
            f"no draft model at {order.draft}; give a draft folder or an .onnx file, or: lookup, none"
        )


def _is_model(drafter: Drafter | None) -> bool:
    return drafter is not None and not isinstance(drafter, LookupDrafter)


def _drafts(placement: Placement) -> bool:
    return placement.drafter == "model"


def is_all_on_gpu(placement: Placement) -> bool:
    layers = placement.num_gpu_layers
    return layers < 0 or layers > placement.plan.setup.verifier.num_layers


def _curves(found: Calibration | None, drafter: Drafter | None) -> Curves | None:
    """What lookup drafts costs nothing, whatever was measured for a model."""
    if found is None or _is_model(drafter):
        return None if found is None else found.curves
    return replace(found.curves, batches=(), step_s=(), overlap=None, read_s=None)


def _draft_name(draft: str | Path, drafter: Drafter | None) -> str:
    if drafter is None:
        return "none"
    return Path(draft).name if _is_model(drafter) else "lookup"
