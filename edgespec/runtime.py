"""A loaded pair, ready to generate: prompts in, chunks of text out.

One thread, the owner, touches the backends; any thread may call a Runtime's methods. Requests are served one at a time,
in the order they start.
"""

from __future__ import annotations

import collections.abc as abc
import os
import queue
import secrets
import threading
import time
import weakref
from dataclasses import dataclass, field, replace
from typing import Literal

from edgespec.core.policy import DEFAULT_POLICY, Policy
from edgespec.core.sequence import Cancelled, Draft, FinishReason, Round, SamplingParams, Sequence
from edgespec.drafters.base import Drafter
from edgespec.engine import lossless
from edgespec.engine.loops import plain, sequential
from edgespec.engine.stats import Stats, Tally
from edgespec.errors import ClosedError, ContextLengthError, ParameterError, PromptError
from edgespec.owner import Owner
from edgespec.text.chat import ChatTemplate, Message
from edgespec.text.output import OutputText
from edgespec.text.tokenizer import Tokenizer
from edgespec.verifiers.base import Interrupted, Verifier

Mode = Literal["plain", "sequential"]
MODES: tuple[Mode, ...] = ("plain", "sequential")
Prompt = str | abc.Sequence[Message | abc.Mapping[str, str]]


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one round added. The texts of all chunks make the answer, their tokens the output.

    text    may be empty: a character, or what could become a stop string, is not whole yet
    tokens  verifier ids, an end-of-generation token included
    finish_reason  in the last chunk only (which has no tokens): "stop", "length" or "cancelled"
    divergences  in the last chunk, where a check was asked for: every difference from plain decoding
    """

    text: str
    tokens: tuple[int, ...]
    stats: Stats
    finish_reason: FinishReason | None = None
    divergences: tuple[lossless.Divergence, ...] | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """A whole answer; fields as in Chunk."""

    text: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason
    stats: Stats
    divergences: tuple[lossless.Divergence, ...] | None = None

    @classmethod
    def of(cls, chunks: abc.Sequence[Chunk]) -> Result:
        """What a stream's chunks add up to, one at least; one left before its last chunk counts as cancelled."""
        last = chunks[-1]
        return cls(
            text="".join(chunk.text for chunk in chunks),
            tokens=tuple(token for chunk in chunks for token in chunk.tokens),
            finish_reason=last.finish_reason or "cancelled",
            stats=last.stats,
            divergences=last.divergences,
        )


@dataclass(eq=False)
class _Request:
    """One prompt on its way, encoded and checked. The owner thread fills ``chunks``, None at the end."""

    sequence: Sequence
    mode: Mode
    policy: Policy
    check: bool
    began: float = 0.0
    cancelled: threading.Event = field(default_factory=threading.Event)
    chunks: queue.SimpleQueue[Chunk | Exception | None] = field(default_factory=queue.SimpleQueue)
    drafts: list[Draft] = field(default_factory=list)


class Stream(abc.Iterator[Chunk]):
    """An answer on its way: iterate over its chunks. The work starts with the first ``next``.

    One thread iterates; any thread may cancel. A stream that is dropped or left (it is a context manager) is cancelled.
    """

    def __init__(self, request: _Request, start: abc.Callable[[_Request], None]) -> None:
        self._request, self._start = request, start
        self._started = self._ended = False

    def __next__(self) -> Chunk:
        """The next chunk; raises ClosedError, BackendError, or whatever ended the work."""
        if self._ended:
            raise StopIteration
        if not self._started:
            self._start(self._request)
            self._started = True
        item = self._request.chunks.get()
        self._ended = not isinstance(item, Chunk)
        if isinstance(item, Exception):
            raise item
        if item is None:
            raise StopIteration
        return item

    def cancel(self) -> None:
        """End the answer within a round; the last chunk still comes, and says "cancelled"."""
        self._request.cancelled.set()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()

    def __del__(self) -> None:
        self.cancel()


def check_mode(mode: Mode) -> Mode:
    if mode not in MODES:
        raise ParameterError(f"mode: got {mode!r}; allowed: {', '.join(MODES)}")
    return mode


class Runtime:
    """A loaded pair that generates text. Use it as a context manager, or call ``close``.

    Every method may be called from any thread. ``load`` makes one; tests make it over fakes.

    mode, policy  what requests get that do not say otherwise; without a drafter the mode is plain
    """

    def __init__(
        self,
        verifier: Verifier,
        drafter: Drafter | None,
        tokenizer: Tokenizer,
        *,
        mode: Mode = "sequential",
        policy: Policy = DEFAULT_POLICY,
        verifier_name: str = "",
        draft_name: str = "none",
        owner: Owner | None = None,
    ) -> None:
        self._verifier, self._drafter, self._tokenizer = verifier, drafter, tokenizer
        self._template = ChatTemplate(tokenizer.chat_template, bos=tokenizer.bos, eos=tokenizer.eos)
        self.mode: Mode = mode if drafter else "plain"
        self.policy = policy
        self.verifier_name, self.draft_name = verifier_name, draft_name
        self._end_tokens = tokenizer.end_tokens
        self._owner = owner or Owner()
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._process = os.getpid()
        # Also runs when the runtime is dropped, and when the program ends.
        self._finalizer = weakref.finalize(self, _finish, self._closing, self._owner, verifier, drafter, self._process)

    def __enter__(self) -> Runtime:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def decode(self, tokens: abc.Iterable[int]) -> str:
        """The text of token ids, special tokens by their spelling; bytes that are no character become U+FFFD."""
        with self._lock:
            self._check_open()
            return b"".join(self._tokenizer.piece(token, special=True) for token in tokens).decode("utf-8", "replace")

    @property
    def num_ctx(self) -> int:
        """Most tokens prompt and answer may have together."""
        return self._verifier.num_ctx

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        raw: bool = False,
        mode: Mode | None = None,
        policy: Policy | None = None,
        check_lossless: bool = False,
    ) -> Stream:
        """Generate after ``prompt`` and yield a chunk a round; the last one carries the finish reason.

        prompt  a text is one user turn, or with ``raw`` what the answer continues; a list of messages is a conversation
        mode, policy  this request's own
        check_lossless  before the last chunk, compare the answer with plain decoding (engine/lossless.py); this costs
                as much as a plain run

        Bad input raises here, not at the first chunk: ParameterError, PromptError, ContextLengthError, ClosedError.
        """
        return Stream(self._request(prompt, params or SamplingParams(), raw, mode, policy, check_lossless), self._start)

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        raw: bool = False,
        mode: Mode | None = None,
        policy: Policy | None = None,
        check_lossless: bool = False,
    ) -> Result:
        """Generate and wait for the whole answer; parameters and errors as in ``stream``."""
        chunks = self.stream(prompt, params, raw=raw, mode=mode, policy=policy, check_lossless=check_lossless)
        return Result.of(list(chunks))

    def encode(self, prompt: Prompt, *, raw: bool = False) -> list[int]:
        """The token ids a prompt becomes, chat template applied unless ``raw``."""
        with self._lock:
            self._check_open()
            return self._encode(prompt, raw)

    def close(self) -> None:
        """Cancel what runs, wait for it, free both models. A second call does nothing."""
        with self._lock:
            self._closing.set()
        self._finalizer()

    # A request: checked on the caller's thread, run on the owner's, read on the caller's.

    def _request(
        self,
        prompt: Prompt,
        params: SamplingParams,
        raw: bool,
        mode: Mode | None,
        policy: Policy | None,
        check: bool,
    ) -> _Request:
        if check:
            lossless.check_params(params)
        mode = check_mode(mode or self.mode)
        if mode != "plain" and self._drafter is None:
            raise ParameterError(f"mode: got {mode!r} without a draft; allowed: plain; load a draft model or lookup")
        for token, _ in params.logit_bias:
            if token >= self._verifier.num_vocab:
                raise ParameterError(f"logit_bias token id: got {token}; allowed: 0 to {self._verifier.num_vocab - 1}")
        tokens = self.encode(prompt, raw=raw)
        if len(tokens) >= self.num_ctx:
            raise ContextLengthError(
                f"the prompt has {len(tokens)} tokens; allowed: at most {self.num_ctx - 1} in a context of "
                f"{self.num_ctx}; shorten it or load with a larger context"
            )
        if params.seed is None and not params.greedy:
            params = replace(params, seed=secrets.randbits(32))
        return _Request(Sequence(tokens, params, self.num_ctx, self._end_tokens), mode, policy or self.policy, check)

    def _encode(self, prompt: Prompt, raw: bool) -> list[int]:
        if isinstance(prompt, str):
            if not prompt or not (raw or prompt.strip()):
                raise PromptError("the prompt is empty; give some text")
            if raw:
                return self._tokenizer.encode(prompt, add_special=True, parse_special=True)
            prompt = [Message("user", prompt)]
        elif raw:
            raise ParameterError("raw: got a list of messages; a raw prompt is a text")
        return self._tokenizer.encode_chat(self._template.render(prompt))

    def _start(self, request: _Request) -> None:
        request.began = time.perf_counter()
        with self._lock:
            self._check_open()
            self._owner.submit(lambda: self._work(request))

    def _check_open(self) -> None:
        if self._closing.is_set():
            raise ClosedError("this runtime was closed; load another")
        if self._process != os.getpid():
            raise ClosedError("this runtime was loaded before the process forked; load another in this process")

    # On the owner thread

    def _work(self, request: _Request) -> None:
        try:
            for chunk in self._chunks(request):
                request.chunks.put(chunk)
        except Exception as error:  # the caller's thread raises it
            request.chunks.put(error)
        finally:
            request.chunks.put(None)

    def _chunks(self, request: _Request) -> abc.Iterator[Chunk]:
        sequence = request.sequence
        text = OutputText(self._tokenizer.piece, sequence.params.stop)
        tally = Tally(sequence.num_prompt, request.mode, sequence.params.seed, request.began)
        if request.check:
            lossless.forget(sequence, self._verifier)
        for round_ in self._rounds(request):
            shown = text.feed(round_.tokens)
            if shown.stopped:
                sequence.cut(len(round_.tokens) - shown.num_tokens)
            if request.check:
                request.drafts.append(round_.draft)
            yield Chunk(shown.emit, round_.tokens[: shown.num_tokens], tally.add(round_, shown.num_tokens))
        yield Chunk(text.flush(), (), tally.stats, sequence.finish_reason, self._divergences(request))

    def _rounds(self, request: _Request) -> abc.Iterator[Round]:
        if request.mode == "plain" or self._drafter is None:
            return plain(request.sequence, self._verifier, self._cancelled(request))
        return sequential(request.sequence, self._drafter, self._verifier, request.policy, self._cancelled(request))

    def _divergences(self, request: _Request) -> tuple[lossless.Divergence, ...] | None:
        if not request.check:
            return None
        try:
            found = lossless.check(request.sequence, request.drafts, self._verifier, self._cancelled(request))
        except Interrupted:
            return None
        return tuple(found)

    def _cancelled(self, request: _Request) -> Cancelled:
        return lambda: request.cancelled.is_set() or self._closing.is_set()


def _finish(closing: threading.Event, owner: Owner, verifier: Verifier, drafter: Drafter | None, process: int) -> None:
    """Cancel what runs, and free both models on the thread that owns them."""
    if process != os.getpid():
        return  # the owner thread does not live in a forked child, and the models are the parent's
    closing.set()

    def free() -> None:
        if drafter is not None:
            drafter.close()
        verifier.close()

    if owner.is_current:  # a collected runtime may be finished on any thread
        free()
        owner.stop()
    else:
        freed = owner.submit(free)
        owner.stop(wait=True)
        freed.result()
