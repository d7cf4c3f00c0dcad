"""What the doctor says of one thing."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from typing import Any, Literal

from edgespec.errors import EdgespecError, FileAccessError

logger = logging.getLogger("edgespec")

Status = Literal["ok", "note", "problem"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    status  "ok"; "note": good to know, and `edgespec run` works all the same; "problem": it fails, or not as configured
    remedy  the command or the edit that mends it; "" where there is none
    error   what `edgespec run` would raise, or the class nearest to it; its exit code is the doctor's
    """

    what: str
    status: Status
    detail: str
    remedy: str = ""
    error: type[EdgespecError] = EdgespecError

    def as_dict(self) -> dict[str, str]:
        """For JSON."""
        return {"what": self.what, "status": self.status, "detail": self.detail, "remedy": self.remedy}


def ok(what: str, detail: str) -> Finding:
    return Finding(what, "ok", detail)


def said(what: str, status: Status, message: str, error: type[EdgespecError] = EdgespecError) -> Finding:
    """A message as edgespec's errors have it: what follows its last semicolon says what to do."""
    detail, _, remedy = " ".join(message.split()).rpartition("; ")
    return Finding(what, status, detail or remedy, remedy if detail else "", error)


def of_error(what: str, error: Exception) -> Finding:
    """Of whatever a check raised; what nobody foresaw is a fault of the check, and is said to be one."""
    if isinstance(error, EdgespecError):
        return said(what, "problem", str(error), type(error))
    if isinstance(error, OSError) and error.filename is not None:
        message = f"{os.fsdecode(error.filename)}: {error.strerror or error}; check the path and its permissions"
        return said(what, "problem", message, FileAccessError)
    logger.debug("the check %s failed", what, exc_info=error)
    text = f"this check failed itself: {type(error).__name__}: {error}"
    return said(what, "problem", f"{text}; please report it, with the output of: edgespec doctor --json")


def as_json(findings: list[Finding]) -> dict[str, Any]:
    return {"ok": first_problem(findings) is None, "findings": [finding.as_dict() for finding in findings]}


def first_problem(findings: list[Finding]) -> Finding | None:
    return next((finding for finding in findings if finding.status == "problem"), None)
