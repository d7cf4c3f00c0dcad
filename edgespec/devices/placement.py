"""Which model runs where on a box, decided before anything is loaded, with a reason for every step down.

Pure: sizes, the box and the profile in, a Placement out. Where what a profile wants cannot be had, the next lower thing
is taken: hybrid (verifier on the GPU, draft model on the CPU), one device, verifier and prompt lookup, plain.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from edgespec.devices.detect import unused_gpu
from edgespec.devices.memory import MemoryPlan, plan_memory, size_text, what_fits
from edgespec.devices.probe import Box
from edgespec.devices.profile import Profile
from edgespec.devices.run_budget import run_budget, usable_gpus
from edgespec.devices.sizes import ModelShape, Setup

Kind = Literal["hybrid", "reverse", "one device", "lookup", "plain"]
Drafter = Literal["model", "lookup", "none"]
Step = tuple[str, str, str]

CUDA = "CUDAExecutionProvider"
# Of the verifier's layers. With fewer on the GPU it runs at the CPU's speed anyway; the draft model makes more of it.
FEW_LAYERS = 0.25


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is to run, and what is known against it.

    draft          sizes of the draft model; None where none is wanted
    lookup         whether prompt lookup drafts where no draft model does
    mode           "plain": nothing drafts. "auto": the draft model goes where it does not fit or does not pay; with any
                   other it stays
    context        tokens of a sequence; None: the profile's
    num_slots      sequences at once
    providers      what ONNX Runtime lists
    gain           tokens a second with the draft model over those without, as measured; None: not known
    draft_problem  why the draft model cannot be used, and what to do; "" where it can
    gpu_problem    the same of the GPU
    """

    verifier: ModelShape
    draft: ModelShape | None = None
    lookup: bool = True
    mode: str = "auto"
    context: int | None = None
    num_slots: int = 1
    providers: tuple[str, ...] = ()
    gain: float | None = None
    draft_problem: str = ""
    gpu_problem: str = ""


@dataclass(frozen=True, slots=True)
class Placement:
    """How a pair runs on a box.

    num_gpu_layers  of the verifier, as LlamaOptions has it: -1 for all, 0 for the CPU
    drafter         "model", "lookup" or "none"
    draft_provider  where ONNX Runtime runs the draft model: "cpu" or "cuda"
    plan            what it takes of the memory
    steps           (from, to, reason), from what was wanted down to this
    """

    num_gpu_layers: int
    drafter: Drafter
    draft_provider: str
    plan: MemoryPlan
    steps: tuple[Step, ...] = ()

    @property
    def kind(self) -> Kind:
        if self.drafter != "model":
            return "lookup" if self.drafter == "lookup" else "plain"
        if self.draft_provider == "cpu":
            return "hybrid" if self.num_gpu_layers else "one device"
        return "one device" if self.num_gpu_layers else "reverse"

    @property
    def name(self) -> str:
        """The kind, and where the verifier runs if that is neither usual nor said by it."""
        layers, most = self.num_gpu_layers, self.plan.setup.verifier.num_layers + 1
        if 0 < layers < most:
            return f"{self.kind} ({layers} of {most} layers on the GPU)"
        return f"{self.kind} (CPU)" if not layers and self.drafter != "model" else self.kind

    def below(self, lower: Placement, reason: str) -> Placement:
        """``lower``, taken instead of this one; no step where there is no reason to speak of."""
        return replace(lower, steps=(*self.steps, step_down(self, lower, reason))) if reason else lower

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "kind": self.kind,
            "num_gpu_layers": self.num_gpu_layers,
            "draft_provider": self.draft_provider if self.drafter == "model" else None,
            "memory": self.plan.as_dict(),
        }


def step_down(upper: Placement, lower: Placement, reason: str) -> Step:
    """For Degraded.add: kinds, or names where both are of one kind."""
    same = upper.kind == lower.kind
    return (upper.name, lower.name, reason) if same else (upper.kind, lower.kind, reason)


def place(wanted: Wanted, profile: Profile, box: Box) -> Placement:
    """The highest placement that this box can have; never fails.

    ``[verifier] gpu_layers`` -1 becomes as many layers as fit the memory that is free; a number is taken as it is.
    """
    case, placement = _Case(wanted, profile, box), wish(wanted, profile, box)
    for rule in (case.without_cuda, case.without_gpu, case.without_use, case.with_fewer_layers, case.without_room):
        change = rule(placement)
        if change is not None:
            placement = placement.below(*change)
    return placement


def wish(wanted: Wanted, profile: Profile, box: Box) -> Placement:
    """What would run if everything could be had."""
    case = _Case(wanted, profile, box)
    draft = wanted.draft if case.drafter == "model" else None
    setup = Setup.of(profile, wanted.verifier, draft, run_budget(profile, box))
    context = setup.context if wanted.context is None else wanted.context
    on_gpu = draft is not None and setup.draft_on_gpu
    setup = replace(setup, context=context, num_slots=wanted.num_slots, draft_on_gpu=on_gpu)
    provider = "cpu" if draft is None else profile.draft.provider
    return Placement(profile.verifier.gpu_layers, case.drafter, provider, plan_memory(setup))


def lower(placement: Placement) -> list[Placement]:
    """What to try, one after the other, when the verifier's device fails: half the layers there, then none."""
    count = placement.plan.setup.num_gpu_layers
    return [_with_layers(placement, fewer) for fewer in dict.fromkeys((count // 2, 0)) if fewer < count]


def _with_layers(placement: Placement, num_gpu_layers: int) -> Placement:
    setup = replace(placement.plan.setup, gpu_layers=num_gpu_layers)
    return replace(placement, num_gpu_layers=num_gpu_layers, plan=plan_memory(setup))


def _with_provider(placement: Placement, provider: str) -> Placement:
    setup = replace(placement.plan.setup, draft_on_gpu=provider != "cpu")
    return replace(placement, draft_provider=provider, plan=plan_memory(setup))


def _without_model(placement: Placement, drafter: Drafter) -> Placement:
    setup = replace(placement.plan.setup, draft=None, draft_on_gpu=False)
    return replace(placement, drafter=drafter, draft_provider="cpu", plan=plan_memory(setup))


Change = tuple[Placement, str] | None


@dataclass(frozen=True, slots=True)
class _Case:
    """The rules, each of which sees a placement and says what is to be taken instead, and why."""

    wanted: Wanted
    profile: Profile
    box: Box

    @property
    def drafter(self) -> Drafter:
        if self.wanted.mode == "plain":
            return "none"
        return "model" if self.wanted.draft is not None else self._substitute

    @property
    def _substitute(self) -> Drafter:
        """For a draft model."""
        return "lookup" if self.wanted.lookup else "none"

    @property
    def _has_cuda(self) -> bool:
        """ONNX Runtime's GPU build lists CUDA on every box; there must be a card too."""
        box = self.box
        there = box.num_nvidia_cards or box.is_jetson or any(gpu.name.startswith("CUDA") for gpu in box.gpus)
        return bool(there) and CUDA in self.wanted.providers

    def without_cuda(self, placement: Placement) -> Change:
        """A draft model that cannot be on the GPU, or would take the place of the verifier's layers there."""
        if placement.draft_provider == "cpu":
            return None
        lower = _with_provider(placement, "cpu")
        if self.wanted.gpu_problem:
            return lower, self.wanted.gpu_problem
        if not self._has_cuda:
            return lower, (
                "ONNX Runtime cannot use CUDA here; install onnxruntime-gpu with CUDA's libraries where there is an "
                "NVIDIA GPU, or set [draft] provider to 'cpu' in the profile"
            )
        if self._too_much(placement) and not self._too_much(lower):
            return lower, f"{_taken(placement.plan)} with the draft model there; {_advice(placement)}"
        return None

    def without_gpu(self, placement: Placement) -> Change:
        if not placement.num_gpu_layers:
            return None
        lower = _with_layers(placement, 0)
        if self.wanted.gpu_problem:
            return lower, self.wanted.gpu_problem
        if usable_gpus(self.profile, self.box):
            return None
        return lower, unused_gpu(self.box) or (self._no_gpu() if placement.drafter == "model" else "")

    def _no_gpu(self) -> str:
        if self.box.gpus or self.box.shared_gpus:
            number = self.profile.verifier.main_gpu
            return f"llama.cpp lists no GPU {number}; choose another [verifier] main_gpu in the profile"
        return "llama.cpp lists no GPU; where none is to be had, a profile with [verifier] gpu_layers 0 says so"

    def without_use(self, placement: Placement) -> Change:
        """A draft model that does not run, or does not pay."""
        if placement.drafter != "model":
            return None
        reason = self.wanted.draft_problem or self._no_gain()
        return (_without_model(placement, self._substitute), reason) if reason else None

    def _no_gain(self) -> str:
        gain = self.wanted.gain
        if self.wanted.mode != "auto" or gain is None or gain > 1:
            return ""
        return (
            f"by calibration the draft model makes {gain:.2f} of the speed without it on this box; another draft model "
            "may pay, or measure again with: edgespec calibrate"
        )

    def with_fewer_layers(self, placement: Placement) -> Change:
        """Only where the profile leaves the number open."""
        if placement.num_gpu_layers >= 0 or not self._too_much(placement):
            return None
        count, plan = self._num_fitting(placement), placement.plan
        why = f"{_taken(plan)} with all {plan.setup.verifier.num_layers + 1} layers there, {count} of them fit"
        reverse = self._reverse(placement)
        if count < FEW_LAYERS * plan.setup.verifier.num_layers and reverse is not None:
            return reverse, f"{why}; the draft model makes more of it; {_advice(placement)}"
        return _with_layers(placement, count), f"{why}; {_advice(placement)}"

    def _num_fitting(self, placement: Placement) -> int:
        setup = self._without_what_may_go(placement.plan.setup)
        counts = range(setup.num_gpu_layers, 0, -1)
        return next((n for n in counts if not _missing_on_gpu(replace(setup, gpu_layers=n))), 0)

    def _too_much(self, placement: Placement) -> bool:
        """Whether GPU memory is short. In shared memory only where fewer layers would help."""
        setup = self._without_what_may_go(placement.plan.setup)
        if setup.gpu == "main" and _missing_on_gpu(replace(setup, gpu_layers=0)):
            return False
        return bool(setup.budget.num_gpus and _missing_on_gpu(setup))

    def _without_what_may_go(self, setup: Setup) -> Setup:
        """In shared memory the draft model goes before the verifier's layers do."""
        return replace(setup, draft=None) if setup.gpu == "main" and self.wanted.mode == "auto" else setup

    def _reverse(self, placement: Placement) -> Placement | None:
        """The draft model on the GPU and the verifier on the CPU; None where that cannot be."""
        if placement.drafter != "model" or not self._has_cuda or placement.plan.setup.gpu == "main":
            return None
        changed = _with_provider(_with_layers(placement, 0), "cuda")
        return None if changed.plan.missing_bytes("gpu") else changed

    def without_room(self, placement: Placement) -> Change:
        """Main memory that is too small for both models."""
        if placement.drafter != "model" or self.wanted.mode != "auto" or not placement.plan.missing_bytes("main"):
            return None
        reason = f"{_taken(placement.plan, 'main')} with the draft model; {_advice(placement)}"
        return _without_model(placement, self._substitute), reason


def _missing_on_gpu(setup: Setup) -> int:
    return plan_memory(setup).missing_bytes(setup.gpu)


def _taken(plan: MemoryPlan, where: Literal["main", "gpu"] | None = None) -> str:
    where = where or plan.setup.gpu
    name = "GPU memory" if where == "gpu" else "main memory"
    used, budget = plan.used_bytes(where), plan.setup.budget.bytes(where)
    return f"{size_text(used)} of {name} are needed and {size_text(budget)} may be taken"


def _advice(placement: Placement) -> str:
    """What would make all of it fit."""
    found = [change for change in what_fits(placement.plan.setup, {}) if "gpu_layers" not in change]
    return f"all would fit with {found[0]}" if found else "a smaller GGUF type of the verifier takes less"
