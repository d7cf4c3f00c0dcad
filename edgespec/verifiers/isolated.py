"""The verifier in a process of its own, so that what kills llama.cpp kills no answer but the one under way."""

from __future__ import annotations

import collections.abc as abc
import json
from dataclasses import asdict, replace
from typing import Any, NoReturn

from edgespec import errors
from edgespec.core.check import check_float
from edgespec.core.prefix import num_common
from edgespec.core.sequence import Cancelled, never
from edgespec.errors import BackendError, ClosedError
from edgespec.verifiers.base import Interrupted, Rows, ScoreRequest, check_requests, check_tokens
from edgespec.verifiers.batch import Span, collected, split
from edgespec.verifiers.isolated_process import ChildProcess
from edgespec.verifiers.isolated_wire import PROPERTIES, Kind, pack_requests
from edgespec.verifiers.llama_devices import LlamaDevice
from edgespec.verifiers.llama_options import LlamaOptions
from edgespec.verifiers.llama_rpc import check_reachable, check_supported, parse_endpoints
from edgespec.verifiers.llama_vocabulary import Vocabulary

PATIENCE_S = 120.0


class IsolatedVerifier:
    """A LlamaVerifier in a child process; see verifiers/base.py for the contract of ``score``.

    Where the child dies, ``score`` raises BackendError and the next call starts another: token lists are whole, so all
    that is lost is the cache. A child that gives no sign of life is ended, which then is the same. Signs of life are
    what is read of the weights, and each batch of a long prompt; on the CPU also its parts.

    num_vocab, num_ctx, num_slots   see base.py
    num_ctx_train, description      see LlamaVerifier
    devices  what llama.cpp lists in the child, the workers' devices among it
    """

    num_vocab: int
    num_ctx: int
    num_slots: int
    num_ctx_train: int
    description: str

    def __init__(
        self, options: LlamaOptions, workers: abc.Iterable[str] = (), *, patience_s: float = PATIENCE_S
    ) -> None:
        """Open it; blocks until the weights are read.

        workers     ``host:port`` of RPC workers whose devices are used beside this box's own
        patience_s  how long the child may give no sign of life

        Raises what LlamaVerifier raises, BackendError for a worker that does not answer, MissingDependencyError for
        workers where llama.cpp is built without RPC.
        """
        check_float("patience_s", patience_s, 0.0, open_low=True)
        self._workers = parse_endpoints(workers)
        self._options = replace(options, path=options.path.absolute())
        self._patience_s = patience_s
        self._closed = False
        self._child: ChildProcess | None = None
        self._vocabulary: Vocabulary | None = None
        try:
            self._open()
            self._vocabulary = Vocabulary(options.path)
        except BaseException:
            self.close()
            raise

    @property
    def model(self) -> Any:
        """A ``llama_model*`` of this process with the vocabulary alone, for a tokenizer. Raises ClosedError."""
        self._check_open()
        assert self._vocabulary is not None
        return self._vocabulary.model

    @property
    def pid(self) -> int | None:
        """The child's process id; None where it is gone and not yet replaced."""
        return None if self._child is None else self._child.pid

    def score(self, requests: abc.Sequence[ScoreRequest], cancelled: Cancelled = never) -> list[Rows]:
        """See Verifier.score. Rows are views of memory shared with the child: do not write."""
        self._check_open()
        check_requests(self, requests)
        if self._child is None:
            self._open(cancelled)
        spans = [Span(r.slot, list(r.tokens), 0, len(r.tokens), r.num_rows) for r in requests]
        return collected(spans, self._max_rows, lambda group: self._score(group, cancelled))

    def set_threads(self, num_threads: int, num_threads_batch: int | None = None) -> None:
        """See LlamaVerifier.set_threads."""
        self._check_open()
        self._options = replace(self._options, num_threads=num_threads, num_threads_batch=num_threads_batch)
        if self._child is not None:  # else the next one starts with them
            self._ask(Kind.THREADS, json.dumps([num_threads, num_threads_batch]).encode())

    def close(self) -> None:
        """End the child; a second call does nothing. ``model`` is then invalid."""
        self._closed = True
        self._drop()
        if self._vocabulary is not None:
            self._vocabulary.close()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("this verifier is closed; open a new one")

    def _open(self, cancelled: Cancelled = never) -> None:
        """Cannot be cancelled; ``cancelled`` is asked as a sign of life, since weights may take minutes to read."""
        if self._workers:
            check_supported()
            check_reachable(self._workers)
        self._child = ChildProcess(self._patience_s)
        asked = {"options": asdict(self._options), "workers": [str(endpoint) for endpoint in self._workers]}
        try:
            ready = json.loads(self._ask(Kind.OPEN, json.dumps(asked, default=str).encode(), cancelled))
        except errors.EdgespecError:
            self._drop()
            raise
        self._take(ready)

    def _take(self, ready: dict[str, Any]) -> None:
        """What the child says of its verifier."""
        assert self._child is not None
        if ready["num_vocab"] != getattr(self, "num_vocab", ready["num_vocab"]):
            self._drop()
            raise BackendError(f"{self._options.path} has been replaced by another model; load it anew")
        for name in PROPERTIES:
            setattr(self, name, ready[name])
        self.devices = tuple(LlamaDevice(**fields) for fields in ready["devices"])
        self._max_rows: int = ready["max_rows"]
        self._rows = self._child.memory.rows(self._max_rows, self.num_vocab)
        self._held: list[list[int]] = [[] for _ in range(self.num_slots)]

    def _score(self, spans: list[Span], cancelled: Cancelled) -> list[Rows]:
        """The rows of spans that fit the shared memory, one after the other."""
        requests = [ScoreRequest(span.slot, span.tokens[: span.stop], span.num_rows) for span in spans]
        num_kept = [num_common(self._held[request.slot], list(request.tokens)) for request in requests]
        for request, kept in zip(requests, num_kept, strict=True):
            if kept < len(request.tokens):
                check_tokens(request.tokens[kept:], self.num_vocab)
        for request in requests:
            self._held[request.slot] = list(request.tokens)
        self._ask(Kind.SCORE, pack_requests(requests, num_kept), cancelled)
        return split(self._rows, spans)

    def _ask(self, kind: Kind, payload: bytes, cancelled: Cancelled = never) -> bytes:
        """The answer's content. Raises Interrupted, and the child's errors as if they had happened here."""
        assert self._child is not None
        try:
            answer, content = self._child.ask(kind, payload, cancelled)
        except BaseException as error:
            self._drop()  # its next answer would be taken for another question's
            if isinstance(error, BackendError) and self._workers:
                raise BackendError(f"{error}; check the workers: {', '.join(map(str, self._workers))}") from None
            raise
        if answer == Kind.INTERRUPTED:
            raise Interrupted
        if answer == Kind.FAILED:
            _raise(**json.loads(content))
        return content

    def _drop(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.end()


def _raise(error: str, message: str) -> NoReturn:
    """An error of the child's, of the same class."""
    kind: type[Exception] = getattr(errors, error) if error in errors.__all__ else BackendError
    raise kind(message)
