"""A calibration, and the file that keeps it: a JSON object in the user's cache, with the whole key inside."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from edgespec.calibration.key import Key
from edgespec.core.costs import Curves
from edgespec.core.track import MAX_DEPTH, Received
from edgespec.devices.threads import Threads
from edgespec.engine.scheduler import Mode
from edgespec.verifiers.llama_options import MAX_THREADS

logger = logging.getLogger("edgespec")

FORMAT = 2
MAX_VALUE = 1e6  # of seconds and gains
MAX_RECEIVED = 10_000  # drafts
MAX_FILE_BYTES = 2**20  # a calibration has some thousand
MODES: tuple[Mode, ...] = ("plain", "sequential", "overlapped")


@dataclass(frozen=True, slots=True)
class Calibration:
    """
    curves       measured with ``threads``
    threads      of both sides, for ``mode``
    mode         what pays
    reason       why, in a sentence
    gain         tokens per second over those of plain decoding, if every drafted token were accepted
    plain_s      a token of plain decoding, with the threads that do it best
    measured_at  when, ISO 8601, UTC
    budget_s     what was allowed to be spent
    is_quick     the short version, which a first run makes
    received     how drafts of usual text were received; none where drafting is free
    """

    curves: Curves
    threads: Threads
    mode: Mode
    reason: str
    gain: float
    plain_s: float
    measured_at: str
    budget_s: float
    is_quick: bool
    received: tuple[Received, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """For JSON; ``from_dict`` makes the same of it."""
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return values | {"curves": self.curves.as_dict(), "threads": asdict(self.threads)}

    @classmethod
    def from_dict(cls, values: Any) -> Calibration:
        """Raises ValueError, TypeError or KeyError for anything that ``as_dict`` did not give."""
        known = set(cls.__dataclass_fields__)
        if set(values) != known:
            raise ValueError(f"keys: got {sorted(values)}; allowed: exactly {sorted(known)}")
        parts = {"curves": Curves.from_dict(values["curves"]), "threads": Threads(**values["threads"])}
        found = cls(**values | parts | {"received": tuple(map(_received, values["received"]))})
        _check(found)
        return found


def _check(found: Calibration) -> None:
    threads = found.threads
    counts = (threads.verifier, threads.draft)
    flags = (threads.spin, threads.together, found.is_quick)
    seconds = (found.gain, found.plain_s, found.budget_s)
    right = (
        all(type(count) is int and 0 < count <= MAX_THREADS for count in counts)
        and all(type(flag) is bool for flag in flags)
        and all(type(value) in (int, float) and 0.0 < value < MAX_VALUE for value in seconds)
        and found.mode in MODES
        and isinstance(found.reason, str)
        and isinstance(found.measured_at, str)
        and len(found.received) <= MAX_RECEIVED
    )
    if not right:
        raise ValueError("a value that no calibration has")


def _received(values: Any) -> Received:
    num_accepted, num_judged, confidences = values
    whole = type(num_accepted) is int and type(num_judged) is int
    if not whole or not 0 <= num_accepted <= num_judged <= num_accepted + 1 or not 0 < num_judged <= MAX_DEPTH:
        raise ValueError("a draft that nobody judged so")
    if confidences and not num_judged <= len(confidences) <= MAX_DEPTH:
        raise ValueError("a draft with other confidences than tokens")
    if not all(type(value) in (int, float) and 0.0 <= value < MAX_VALUE for value in confidences):
        raise ValueError("a confidence that no drafter has")
    return Received(num_accepted, num_judged, tuple(confidences))


class _UnusableError(ValueError):
    """Says why, in words for the log."""


def load(key: Key) -> Calibration | None:
    """What was measured for ``key``; None where nothing was. A file that does not hold it is logged, and no error."""
    try:
        return _parse(_read(key.path), key)
    except FileNotFoundError:
        return None
    except OSError as error:
        reason = error.strerror or str(error)
    except _UnusableError as error:
        reason = str(error)
    except (ValueError, TypeError, KeyError, RecursionError):
        reason = "its content is not a calibration's"
    logger.warning("the calibration %s is measured anew: %s", key.path, reason)
    return None


def _read(path: Path) -> Any:
    with path.open("rb") as file:
        data = file.read(MAX_FILE_BYTES + 1)
    if len(data) > MAX_FILE_BYTES:
        raise _UnusableError("it is too large")
    return json.loads(data)


def _parse(content: Any, key: Key) -> Calibration:
    if content["format"] != FORMAT:
        raise _UnusableError(f"it is not of format {FORMAT}")
    if content["key"] != key.as_dict():
        raise _UnusableError("it is of other hardware, models or settings")
    return Calibration.from_dict(content["calibration"])


def store(key: Key, calibration: Calibration) -> Path | None:
    """Keep it, whole or not at all; None where that is not possible, which only costs the next measurement."""
    content = {"format": FORMAT, "key": key.as_dict(), "calibration": calibration.as_dict()}
    path, unfinished = key.path, None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".tmp")
        unfinished = Path(name)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(content, file)
        unfinished.replace(path)
    except OSError:
        if unfinished is not None:
            with contextlib.suppress(OSError):
                unfinished.unlink()
        return None
    return path
