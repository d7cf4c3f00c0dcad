"""How far the student is from the teacher, and the gradient of that, without ever holding a batch's logits.

A row of logits is a vocabulary wide, a batch has thousands of rows: they are made, compared and turned into the
gradient a slice of rows at a time.
"""

from __future__ import annotations

import collections.abc as abc
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, linear

_ROWS = 512  # of logits at a time: few enough for the processor's caches, enough for fast products


class Student(Protocol):
    """See decoder.py."""

    def logits(self, hidden: Tensor) -> Tensor: ...


class Divergence(NamedTuple):
    """Means over positions: KL(teacher || student) in nats, and 1 - cosine of the hidden states."""

    loss: float
    hidden: float


def backward(student: Student, hidden: Tensor, taught: Tensor, head: Tensor, hidden_weight: float) -> Divergence:
    """Add the gradient of the mean of KL + ``hidden_weight`` x (1 - cosine) to the student's parameters.

    hidden  (positions, width), the student's, with their graph
    taught  (positions, width) bfloat16, the teacher's
    head    (num_head, width) bfloat16, the teacher's
    """
    gradients, loss = [], hidden.new_zeros(())
    for rows in _slices(len(hidden)):
        part = hidden[rows].detach().requires_grad_()
        logits = student.logits(part)
        with torch.no_grad():
            found, gradient = _kl(linear(taught[rows], head), logits)
            loss += found
            gradient = gradient.mul_(1 / len(hidden)).to(logits.dtype)
        logits.backward(gradient)  # type: ignore[no-untyped-call]
        assert part.grad is not None
        gradients.append(part.grad)
    distance = _distance(hidden, taught)
    torch.autograd.backward([hidden, distance], [torch.cat(gradients), distance.new_tensor(hidden_weight)])
    return Divergence(float(loss) / len(hidden), float(distance.detach()))


def _slices(count: int) -> abc.Iterator[slice]:
    return (slice(start, start + _ROWS) for start in range(0, count, _ROWS))


def _kl(teacher: Tensor, student: Tensor) -> tuple[Tensor, Tensor]:
    """The sum over rows of logits, and its gradient to the student's: q - p."""
    teacher, student = teacher.float(), student.float()
    p, q = teacher.softmax(-1), student.softmax(-1)
    sums = (_log_sum(student, q) - _log_sum(teacher, p)).sum()
    return sums + torch.dot(p.flatten(), teacher.sub_(student).flatten()), q.sub_(p)


def _log_sum(logits: Tensor, probabilities: Tensor) -> Tensor:
    """Of the exponentials of each row, from the largest and its probability: cheaper than to sum again."""
    return logits.amax(-1) - probabilities.amax(-1).log()


def _distance(hidden: Tensor, taught: Tensor) -> Tensor:
    return 1.0 - cosine_similarity(hidden.float(), taught.float(), dim=-1).mean()


class Comparison(NamedTuple):
    """Sums over positions: of both parts of a Divergence, of how many positions, on how many of those that the model
    wrote both have the same most likely token, and of how many there are."""

    loss: float
    hidden: float
    num_positions: int
    num_agreed: int
    num_written: int


@torch.no_grad()
def compare(student: Student, hidden: Tensor, taught: Tensor, head: Tensor, written: Tensor) -> Comparison:
    """As ``backward``, but logits in float32, since bfloat16 ones tie; ``written`` (positions,) bool."""
    hidden, head = hidden.float(), head.float()
    loss, agreed = 0.0, 0
    for rows in _slices(len(hidden)):
        theirs, ours = linear(taught[rows].float(), head), student.logits(hidden[rows]).float()
        agreed += int(((theirs.argmax(-1) == ours.argmax(-1)) & written[rows]).sum())
        loss += float(_kl(theirs, ours)[0])
    distance = len(hidden) * float(_distance(hidden, taught))
    return Comparison(loss, distance, len(hidden), agreed, int(written.sum()))
