"""How a verifier receives a draft model's drafts, found out on usual text before anybody asks for any."""

from __future__ import annotations

import collections.abc as abc
import time

from edgespec.core.policy import Plan
from edgespec.core.sequence import Cancelled, Round, SamplingParams, Sequence, never
from edgespec.core.track import Received
from edgespec.drafters.base import Drafter
from edgespec.engine.calibrate import RunDraft, answer
from edgespec.engine.rounds import commit, request, running, verify
from edgespec.engine.samples import MAX_SAMPLE_S, Clock
from edgespec.verifiers.base import Interrupted, Verifier

LENGTH = 4  # of a draft: what is right at the first tokens is right further on, as far as its confidence says
TEMPERATURES = (0.8, 0.0)  # of the prompts, in turn
MAX_CONFIDENCE = 1000.0  # of a token without a rival it is infinite, which no file can hold
MIN_JUDGED = 16  # tokens without which an acceptance rate is a guess


def receive(
    verifier: Verifier,
    drafter: Drafter,
    run_draft: RunDraft,
    prompts: abc.Iterable[abc.Sequence[int]],
    *,
    budget_s: float,
    num_tokens: int,
    end_tokens: frozenset[int] = frozenset(),
    cancelled: Cancelled = never,
    clock: Clock = time.perf_counter,
) -> tuple[Received, ...]:
    """How the drafts of answers to ``prompts`` were received. On the thread that owns the verifier; slot 0 of both
    caches is overwritten.

    run_draft   has a call done on the drafter's thread
    prompts     token ids; one that does not fit the context with an answer is left out
    budget_s    no round begins after so many seconds; those of the first, which reads the prompt, do not count
    num_tokens  most of each answer

    Raises Interrupted when ``cancelled``, BackendError when a side fails or the drafter does not answer.
    """
    found: list[Received] = []
    began: float | None = None

    def is_over() -> bool:
        return cancelled() or (began is not None and not 0.0 <= clock() - began < min(budget_s, MAX_SAMPLE_S))

    for number, prompt in enumerate(prompts):
        params = SamplingParams(
            temperature=TEMPERATURES[number % len(TEMPERATURES)], seed=number, max_tokens=num_tokens
        )
        sequence = Sequence([*prompt], params, verifier.num_ctx, end_tokens)
        if sequence.room < num_tokens:
            continue
        while running(sequence, is_over):
            if (round_ := _round(sequence, verifier, drafter, run_draft, cancelled)) is None:
                break
            began = clock() if began is None else began
            found.append(_received(round_))
    if cancelled():
        raise Interrupted
    return tuple(one for one in found if one.num_judged)


def _received(round_: Round) -> Received:
    received = Received.of(round_)
    return received._replace(confidences=tuple(min(one, MAX_CONFIDENCE) for one in received.confidences))


def acceptance(received: abc.Sequence[Received]) -> float | None:
    """The chance that a drafted token is accepted if all before it in its draft were; None where too few were."""
    num_judged = sum(one.num_judged for one in received)
    return sum(one.num_accepted for one in received) / num_judged if num_judged >= MIN_JUDGED else None


def _round(
    sequence: Sequence, verifier: Verifier, drafter: Drafter, run_draft: RunDraft, cancelled: Cancelled
) -> Round | None:
    wanted = request(sequence, list(sequence.tokens), Plan(LENGTH))
    (draft,) = answer(run_draft(lambda: drafter.propose([wanted], cancelled)))
    rows, seconds = verify(sequence, draft, verifier, cancelled)
    return None if rows is None else commit(sequence, draft, rows, 0.0, seconds)
