"""A loaded pair, ready to generate: prompts in, chunks of text out.

One thread, the owner, runs the engine and touches the verifier; the drafter has its own. Any thread may call a
Runtime's methods. As many requests are served at once as both backends have slots; the others wait, in their order.
"""

from __future__ import annotations

import collections.abc as abc
import os
import secrets
import threading
import time
import weakref
from dataclasses import dataclass, replace

from edgespec.core.costs import Curves
from edgespec.core.policy import DEFAULT_POLICY, Policy
from edgespec.core.sequence import FinishReason, SamplingParams, Sequence
from edgespec.core.track import Received
from edgespec.degraded import Degraded
from edgespec.drafters.base import Drafter
from edgespec.engine import lossless
from edgespec.engine.draft_thread import DraftThread
from edgespec.engine.look_ahead import MAX_AHEAD
from edgespec.engine.scheduler import Mode
from edgespec.engine.stats import Stats, Tally
from edgespec.errors import ClosedError, ContextLengthError, ParameterError, PromptError
from edgespec.owner import Owner
from edgespec.service import PATIENCE_S, Chunk, Item, Request, Service
from edgespec.text.chat import ChatTemplate, Message
from edgespec.text.output import OutputText
from edgespec.text.tokenizer import Tokenizer
from edgespec.verifiers.base import Verifier

__all__ = ["Chunk", "Mode", "Result", "Runtime", "Stream"]

MODES: tuple[Mode, ...] = ("plain", "sequential", "overlapped")
Prompt = str | abc.Sequence[Message | abc.Mapping[str, str]]


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


class Stream(abc.Iterator[Chunk]):
    """An answer on its way: iterate over its chunks. The work starts with the first ``next``.

    One thread iterates; any thread may cancel. A stream that is dropped or left (it is a context manager) is cancelled.
    """

    def __init__(
        self, request: Request, start: abc.Callable[[Request], None], wait: abc.Callable[[Request], Item]
    ) -> None:
        self._request, self._start, self._wait = request, start, wait
        self._started = self._ended = False

    def __next__(self) -> Chunk:
        """The next chunk; raises ClosedError, BackendError, or whatever ended the work."""
        if self._ended:
            raise StopIteration
        if not self._started:
            self._start(self._request)
            self._started = True
        item = self._wait(self._request)
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
    curves        what rounds cost, measured; None: nobody knows, and no speedup is reported
    received      how drafts of other text were received, to start from
    degraded      the steps down from how the pair was meant to run
    placement     what runs where, for people, as loaded; ``degraded`` has what came later
    max_ahead     most tokens a look-ahead drafts
    owner, draft_owner  the threads that opened the backends; None: new ones
    patience_s    without a sign of life for so long, the verifier is given up
    """

    def __init__(
        self,
        verifier: Verifier,
        drafter: Drafter | None,
        tokenizer: Tokenizer,
        *,
        mode: Mode = "sequential",
        policy: Policy = DEFAULT_POLICY,
        curves: Curves | None = None,
        received: abc.Iterable[Received] = (),
        degraded: Degraded | None = None,
        max_ahead: int = MAX_AHEAD,
        placement: str = "",
        verifier_name: str = "",
        draft_name: str = "none",
        owner: Owner | None = None,
        draft_owner: Owner | None = None,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._verifier, self._tokenizer = verifier, tokenizer
        self._template = ChatTemplate(tokenizer.chat_template, bos=tokenizer.bos, eos=tokenizer.eos)
        self.mode: Mode = mode if drafter else "plain"
        self.policy = policy
        self.degraded = degraded or Degraded()
        self.placement, self.verifier_name, self.draft_name = placement, verifier_name, draft_name
        self._end_tokens = tokenizer.end_tokens
        self._drafter = DraftThread(drafter, self.degraded, owner=draft_owner) if drafter else None
        self._service = Service(
            verifier,
            self._drafter,
            curves=curves,
            received=received,
            max_ahead=max_ahead,
            owner=owner,
            patience_s=patience_s,
        )
        self._lock = threading.Lock()
        self._process = os.getpid()
        # Also runs when the runtime is dropped, and when the program ends.
        self._finalizer = weakref.finalize(self, _finish, self._service, self._process)

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
        request = self._request(prompt, params or SamplingParams(), raw, mode, policy, check_lossless)
        return Stream(request, self._start, self._service.wait)

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
        with self._lock:  # whoever encodes, or has just been let in, is done first
            self._service.refuse()
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
    ) -> Request:
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
        sequence = Sequence(tokens, params, self.num_ctx, self._end_tokens)
        return Request(
            sequence,
            mode,
            policy or self.policy,
            OutputText(self._tokenizer.piece, params.stop),
            Tally(len(tokens), mode, params.seed),
            check,
        )

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

    def _start(self, request: Request) -> None:
        request.tally.began = time.perf_counter()
        with self._lock:
            self._check_open()
            self._service.submit(request)

    def _check_open(self) -> None:
        if self._service.is_closed:
            raise ClosedError("this runtime was closed; load another")
        if self._process != os.getpid():
            raise ClosedError("this runtime was loaded before the process forked; load another in this process")


def _finish(service: Service, process: int) -> None:
    if process == os.getpid():  # the threads do not live in a forked child, and the models are the parent's
        service.close()
