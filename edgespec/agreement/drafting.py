"""What a draft model is worth, measured on the answers that its verifier itself gives."""

from __future__ import annotations

import collections.abc as abc
import contextlib
import random
import statistics
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from edgespec.agreement.answers import Answer, Prompt, answer, encode, foreseen
from edgespec.agreement.drafting_result import DEPTH, TEMPERATURES, Drafting
from edgespec.agreement.matches import Matches
from edgespec.core.check import check_int
from edgespec.core.costs import Curves
from edgespec.core.sequence import MAX_SEED, SamplingParams
from edgespec.devices.probe import usable_threads
from edgespec.drafters import vocabulary
from edgespec.drafters.base import Drafter, DraftRequest
from edgespec.engine.calibrate import GREEDY, Scope, measure, random_tokens
from edgespec.errors import BackendError, PromptError
from edgespec.paths import cache_dir
from edgespec.text.tokenizer import Tokenizer
from edgespec.verifiers.canary import use_extra_bufts
from edgespec.verifiers.llama import LlamaOptions, LlamaVerifier, check_file
from edgespec.verifiers.llama_options import MAX_SLOTS, NUM_CTX
from edgespec.verifiers.llama_vocabulary import open_vocabulary

if TYPE_CHECKING:
    from edgespec.drafters.onnx import OnnxDrafter

__all__ = ["PROMPTS", "Drafting", "measure_drafts"]

PROMPTS = Path(__file__).with_name("prompts.jsonl")  # written for this (Apache-2.0); lines as in Spec-Bench
DRAFT_THREADS = 2  # most for a draft model: a small one gains nothing from more
NUM_STEPS = 50  # drafted tokens that are timed
# Rows of one verification: those that drafts of LENGTHS need, the most telling first.
SCOPE = Scope((1, 5, 9, 3, 2, 4, 7, 6, 8), (DEPTH,), (), (0.5, 0.5, 0.5, 1.0))
CURVE_S = 10.0

Progress = abc.Callable[[str, float], None]


def measure_drafts(
    drafts: abc.Sequence[Path],
    verifier: Path,
    questions: abc.Iterable[tuple[str, str]],
    *,
    max_tokens: int = 80,
    seed: int = 1,
    num_threads: int | None = None,
    num_slots: int = 8,
    progress: Progress | None = None,
) -> list[Drafting]:
    """Have the verifier answer, and say of each draft model what it foresees of the answers. Blocks; on this thread.

    drafts       draft folders, or published .onnx files
    verifier     a GGUF
    questions    (category, text of a user's turn)
    max_tokens   of an answer
    num_threads  for the verifier; None: the usable CPUs. A draft gets at most DRAFT_THREADS of them
    num_slots    answers written at once, which takes a KV cache for each of them; 1 where there is no memory for more
    progress     called on this thread with what is being done and the finished fraction, 0 to 1

    Never more than one row of logits for each slot is kept. Raises ParameterError, PromptError, ModelNotFoundError,
    ModelFormatError, FileAccessError, VocabularyMismatchError, MissingDependencyError, BackendError.
    """
    check_int("max_tokens", max_tokens, 1, NUM_CTX - 1)
    check_int("num_slots", num_slots, 1, MAX_SLOTS)
    check_int("seed", seed, 0, MAX_SEED // 2)  # prompts add their number
    check_int("num_threads", 1 if num_threads is None else num_threads, 1)
    check_file(verifier)
    num_threads = usable_threads(num_threads)
    report = progress or (lambda stage, fraction: None)
    report("reading prompts", 0.0)
    order = _Order(verifier, max_tokens, seed, num_threads, num_slots)
    answered = order.answers(questions, _part(report, 0.0, 0.6))
    size = 0.4 / max(1, len(drafts))
    found = [order.read(draft, answered, _part(report, 0.6 + size * i, size)) for i, draft in enumerate(drafts)]
    report("done", 1.0)
    return found


def _part(report: Progress, start: float, size: float) -> Progress:
    """Progress of a part, within the whole."""
    return lambda stage, fraction: report(stage, start + size * fraction)


@dataclass(frozen=True, slots=True)
class _Answered:
    """
    answers     of each prompt, one at each of TEMPERATURES
    curves      of verifying
    num_ctx     the verifier's
    vocabulary  its tokens
    """

    answers: list[list[Answer]]
    num_left_out: int
    curves: Curves
    num_ctx: int
    vocabulary: abc.Sequence[str]


@dataclass(frozen=True, slots=True)
class _Order:
    """What is to be measured; see ``measure_drafts``."""

    verifier: Path
    max_tokens: int
    seed: int
    num_threads: int
    num_slots: int

    def answers(self, questions: abc.Iterable[tuple[str, str]], report: Progress) -> _Answered:
        with open_vocabulary(self.verifier) as model:
            tokenizer = Tokenizer(model)
            tokens, end_tokens, prompts = tokenizer.tokens, tokenizer.end_tokens, encode(tokenizer, questions)
        with self._opened(_num_ctx(prompts, self.max_tokens)) as opened:
            fitting = _fitting(prompts, opened.num_ctx - self.max_tokens)
            curves = measure(opened, None, budget_s=CURVE_S, scope=SCOPE, progress=_part(report, 0.0, 0.2))
            share = _part(report, 0.2, 0.8)
            answers = answer(opened, fitting, self._params(), end_tokens, lambda done: share("answering", done))
            return _Answered(answers, len(prompts) - len(fitting), curves, opened.num_ctx, tokens)

    def _params(self) -> list[SamplingParams]:
        return [
            SamplingParams(max_tokens=self.max_tokens, temperature=temperature, seed=self.seed, rule="coupled")
            for temperature in TEMPERATURES
        ]

    def _opened(self, num_ctx: int) -> contextlib.closing[LlamaVerifier]:
        extra = use_extra_bufts(cache_dir())
        options = LlamaOptions(
            self.verifier, self.num_threads, max_ctx=num_ctx, num_slots=self.num_slots, use_extra_bufts=extra
        )
        try:
            return contextlib.closing(LlamaVerifier(options))
        except BackendError:  # a large model leaves little room for caches; one is what it will run with
            return contextlib.closing(LlamaVerifier(replace(options, num_slots=1)))

    def read(self, draft: Path, answered: _Answered, report: Progress) -> Drafting:
        from edgespec.drafters.onnx import OnnxDrafter

        num_threads = min(DRAFT_THREADS, self.num_threads)
        report(f"reading with {draft.name}", 0.0)
        drafter = OnnxDrafter.open(
            draft, num_ctx=answered.num_ctx, num_threads=num_threads, num_vocab=len(answered.vocabulary)
        )
        with contextlib.closing(drafter):
            vocabulary.check(drafter.tokens, answered.vocabulary)
            step_s = _step_s(drafter)
            matches = _matches(drafter, answered.answers, lambda done: report(f"reading with {draft.name}", done))
        return Drafting(
            draft=draft,
            verifier=self.verifier,
            matches=matches,
            num_prompts=len(answered.answers),
            num_left_out=answered.num_left_out,
            max_tokens=self.max_tokens,
            seed=self.seed,
            curves=replace(answered.curves, batches=(1,), step_s=(step_s,)),
            num_threads=num_threads,
            size_bytes=_num_bytes(draft),
        )


def _num_ctx(prompts: abc.Iterable[Prompt], max_tokens: int) -> int:
    """Room for the longest prompt that any runtime has room for, and for what is timed."""
    lengths = [len(prompt.tokens) + max_tokens for prompt in prompts]
    return max([DEPTH + max(SCOPE.widths) + 1, *(length for length in lengths if length <= NUM_CTX)])


def _fitting(prompts: list[Prompt], max_prompt: int) -> list[Prompt]:
    """Those of at most so many tokens. Raises PromptError when there are none."""
    fitting = [prompt for prompt in prompts if len(prompt.tokens) <= max_prompt]
    if not fitting:
        raise PromptError(
            f"none of the {len(prompts)} prompts to measure on has at most {max_prompt} tokens, which is what the "
            "verifier's context leaves for them; give shorter ones"
        )
    return fitting


def _matches(
    drafter: Drafter, answers: list[list[Answer]], report: abc.Callable[[float], None]
) -> dict[float, dict[str, Matches]]:
    """By temperature and category. All answers to a prompt one after the other: it is then read once."""
    found: dict[float, dict[str, list[tuple[bool, ...]]]] = {temperature: {} for temperature in TEMPERATURES}
    for i, group in enumerate(answers):
        for one in group:
            found[one.params.temperature].setdefault(one.category, []).append(foreseen(drafter, one))
        report((i + 1) / len(answers))
    return {
        temperature: {category: Matches(tuple(matches)) for category, matches in by_category.items()}
        for temperature, by_category in found.items()
    }


def _step_s(drafter: OnnxDrafter) -> float:
    """Median seconds of one drafted token, with DEPTH others in the cache or as many as it can hold."""
    tokens = random_tokens(random.Random(0), drafter.num_vocab, min(DEPTH + 1, drafter.num_ctx - 1))
    request = DraftRequest(0, tokens, len(tokens), 1, GREEDY)  # asked again, only the last one is evaluated
    times = []
    for _ in range(1 + NUM_STEPS):
        start_s = time.perf_counter()
        drafter.propose([request])
        times.append(time.perf_counter() - start_s)
    return statistics.median(times[1:])


def _num_bytes(draft: Path) -> int:
    """Of a draft folder all files; of a published .onnx it and the weights named after it."""
    if draft.is_dir():
        return sum(path.stat().st_size for path in draft.rglob("*") if path.is_file())
    return sum(path.stat().st_size for path in draft.parent.glob(f"{draft.name}*"))
