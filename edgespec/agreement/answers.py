"""Answers that a verifier gives, several at once, and which of their tokens a drafter would have proposed."""

from __future__ import annotations

import collections.abc as abc
from dataclasses import replace
from typing import NamedTuple

from edgespec.core.costs import Costs
from edgespec.core.sequence import SamplingParams, Sequence
from edgespec.drafters.base import Drafter, DraftRequest
from edgespec.engine.scheduler import Job, Scheduler
from edgespec.text.chat import ChatTemplate, Message
from edgespec.text.tokenizer import Tokenizer
from edgespec.verifiers.base import Verifier


class Prompt(NamedTuple):
    """Tokens of a prompt, the chat template applied."""

    category: str
    tokens: list[int]


class Answer(NamedTuple):
    """A prompt's tokens with the answer's after them, drawn with ``params``."""

    category: str
    tokens: list[int]
    num_prompt: int
    params: SamplingParams


def encode(tokenizer: Tokenizer, questions: abc.Iterable[tuple[str, str]]) -> list[Prompt]:
    """Of (category, text): each text is a user's turn; a model without a chat template goes on from the text itself."""
    template = ChatTemplate(tokenizer.chat_template, bos=tokenizer.bos, eos=tokenizer.eos)
    if tokenizer.chat_template is None:
        return [Prompt(name, tokenizer.encode(text, add_special=True, parse_special=False)) for name, text in questions]
    return [Prompt(name, tokenizer.encode_chat(template.render([Message("user", text)]))) for name, text in questions]


def answer(
    verifier: Verifier,
    prompts: abc.Sequence[Prompt],
    params: abc.Sequence[SamplingParams],
    end_tokens: frozenset[int],
    report: abc.Callable[[float], None],
) -> list[list[Answer]]:
    """Of each prompt an answer with each of ``params``, in their order; as many at once as the verifier has slots.

    The seed of prompt i is ``params``' own plus i. ``report`` is called with the finished share. On the thread that
    owns the verifier. Raises BackendError.
    """
    scheduler, answers = Scheduler(verifier, None, Costs()), []
    for first in range(0, len(prompts), verifier.num_slots):
        # The same prompts again while the slots hold them: most of the work may be reading prompts.
        numbered = list(enumerate(prompts))[first : first + verifier.num_slots]
        group = []
        for i, one in enumerate(params):
            jobs = [Job(_sequence(verifier, prompt, number, one, end_tokens), "plain") for number, prompt in numbered]
            _run(scheduler, jobs)
            group.append([_answer(job, prompt) for job, (_, prompt) in zip(jobs, numbered, strict=True)])
            report((first + len(numbered) * (i + 1) / len(params)) / len(prompts))
        answers += [list(one) for one in zip(*group, strict=True)]
    return answers


def _sequence(
    verifier: Verifier, prompt: Prompt, number: int, params: SamplingParams, end_tokens: frozenset[int]
) -> Sequence:
    return Sequence(
        list(prompt.tokens), replace(params, seed=(params.seed or 0) + number), verifier.num_ctx, end_tokens
    )


def _answer(job: Job, prompt: Prompt) -> Answer:
    return Answer(prompt.category, job.sequence.tokens, job.sequence.num_prompt, job.sequence.params)


def _run(scheduler: Scheduler, jobs: abc.Iterable[Job]) -> None:
    for job in jobs:
        scheduler.add(job)
    while not scheduler.is_idle:
        for event in scheduler.step():
            if event.error is not None:
                raise event.error


def foreseen(drafter: Drafter, answer: Answer) -> tuple[bool, ...]:
    """Of each token of the answer, whether the drafter proposes it after those before it, drawn with the same noise.

    One token at a time, as in decoding, by slot 0. On the thread that owns the drafter. Raises BackendError.
    """
    return tuple(
        _proposed(drafter, answer, place) == (answer.tokens[place],)
        for place in range(answer.num_prompt, len(answer.tokens))
    )


def _proposed(drafter: Drafter, answer: Answer, place: int) -> tuple[int, ...]:
    (draft,) = drafter.propose([DraftRequest(0, answer.tokens[:place], answer.num_prompt, 1, answer.params)])
    return draft.tokens
