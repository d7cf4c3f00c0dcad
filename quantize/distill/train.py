"""The student learns the teacher's distribution over the texts of a corpus."""

from __future__ import annotations

import collections.abc as abc
import contextlib
import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from edgespec.errors import ModelFormatError, ParameterError
from quantize.distill import checkpoint
from quantize.distill.batches import Batch, collate, epoch, split
from quantize.distill.corpus import Corpus
from quantize.distill.decoder import Decoder
from quantize.distill.divergence import Comparison, backward, compare
from quantize.distill.history import History, Point
from quantize.distill.interrupt import signals_between_steps
from quantize.distill.rounding import rounded_weights
from quantize.distill.schedule import DECAY_SHARE, Schedule
from quantize.distill.train_settings import TrainSettings

Progress = abc.Callable[[str, float], None]

BETAS, WEIGHT_DECAY, MAX_NORM = (0.9, 0.95), 0.1, 1.0
MIN_DECAY = 0.05  # steps, of those before, even when the time is up
_SMOOTHING = 0.05  # of the measured time of a step

Numbers = NDArray[np.int64]


def train(
    decoder: Decoder,
    corpus: Corpus,
    teacher_head: Tensor,
    settings: TrainSettings,
    folder: Path,
    progress: Progress | None = None,
    stop: abc.Callable[[], bool] | None = None,
) -> History:
    """Train ``decoder`` in place, from its last checkpoint in ``folder`` if there is one, else from what it is.

    teacher_head  (num_head, width), the teacher's rows of the ids that the decoder's head speaks
    progress      called on this thread with what is being done and the finished fraction, 0 to 1
    stop          asked between steps; once it says yes, the state is saved and the History returned is not finished

    Checkpoints are bound to this machine and number of threads only by rounding: on the same ones a training that was
    interrupted ends with the same weights, bit for bit, as one that was not, if epochs alone bound it. Its hours are
    the other bound: they end it a little early or late, and when the decay of the learning rate begins is decided by
    the clock. SIGINT, SIGTERM and SIGHUP wait for the end of the step, and for a checkpoint, when this is the main
    thread.

    Raises ParameterError (too few texts; a checkpoint of other settings; a learning rate with which the loss is no
    number any more), ModelFormatError (a damaged checkpoint or corpus, or one that lost texts), FileAccessError.
    """
    trainer = _Trainer(decoder, corpus, teacher_head, settings, folder, progress or (lambda stage, fraction: None))
    trainer.resume()
    with signals_between_steps() as interrupted:
        return trainer.run(lambda: interrupted() or (stop is not None and stop()))


@dataclass(slots=True)
class _State:
    """Where a training stands; with the weights and the optimizer's state this is all of it.

    epoch, place     the next batch
    seconds_s        over all sittings
    step_s           smoothed
    loss, num_losses  the sum of batches' since the last point, and how many
    rounded_from     the step since which the student's weights are rounded
    """

    schedule: Schedule
    step: int = 0
    epoch: int = 0
    place: int = 0
    num_tokens: int = 0
    seconds_s: float = 0.0
    step_s: float = 0.0
    loss: float = 0.0
    num_losses: int = 0
    rounded_from: int | None = None


class _Trainer:
    def __init__(
        self, decoder: Decoder, corpus: Corpus, head: Tensor, settings: TrainSettings, folder: Path, progress: Progress
    ) -> None:
        self.decoder, self.corpus, self.settings = decoder, corpus, settings
        self.folder, self.progress = folder, progress
        self.device = str(decoder.device)
        self.head = head.to(self.device, torch.bfloat16)
        self.numbers, self.held_out = split(len(corpus))
        self.lengths = np.array([min(entry.num_tokens, settings.max_length) for entry in corpus.texts])
        self.parameters = [parameter for parameter in decoder.parameters() if parameter.requires_grad]
        self.optimizer = _optimizer(self.parameters, settings.learning_rate)
        self.batches: list[Numbers] = []
        self.clock_s, self.saved_step = time.monotonic(), -1
        self.most_steps = None if settings.epochs is None else self._num_steps(settings.epochs)
        self.points: list[Point] = []
        warm_up = settings.warm_up if self.most_steps is None else min(settings.warm_up, self.most_steps // 10)
        self.state = _State(Schedule(warm_up))

    # ----------------------------------------------------------------------------------------------------- the loop

    def run(self, stop: abc.Callable[[], bool]) -> History:
        saved_s = self.clock_s = time.monotonic()
        self._begin_epoch()
        if not self.points:
            self._look()
        while not self._is_over():
            self._step()
            if self.state.step % self.settings.eval_every == 0:
                self._look()
            self._clock()
            stopped = stop()
            if stopped or time.monotonic() - saved_s > self.settings.save_every_s:
                self._save()
                saved_s = time.monotonic()
            self.progress(self._stage(), self._fraction())
            if stopped:
                return self.history()
        self._finish()
        return self.history()

    def _step(self) -> None:
        state = self.state
        batch = self._batch(self.batches[state.place], state.step)
        if len(batch.places):
            self._learn(batch)
        state.step, state.place = state.step + 1, state.place + 1
        state.num_tokens += batch.num_tokens
        if state.place == len(self.batches):
            state.epoch, state.place = state.epoch + 1, 0
            self._begin_epoch()

    def _learn(self, batch: Batch) -> None:
        state, settings = self.state, self.settings
        for group in self.optimizer.param_groups:
            group["lr"] = settings.learning_rate * state.schedule.factor(state.step)
        with self._weights(), torch.autocast(self.decoder.device.type, torch.bfloat16):
            found = backward(self.decoder, self._hidden(batch), batch.taught, self.head, settings.hidden_weight)
        self._check_finite(found.loss)
        torch.nn.utils.clip_grad_norm_(self.parameters, MAX_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()
        state.loss, state.num_losses = state.loss + found.loss, state.num_losses + 1

    def _check_finite(self, loss: float) -> None:
        """What is not finite never is again: neither are the weights."""
        if not math.isfinite(loss):
            raise ParameterError(
                f"learning_rate: got {self.settings.learning_rate:g}, with which the loss is {loss} at step "
                f"{self.state.step}; begin anew (--force) with a lower one, or a lower --hidden-weight"
            )

    def _batch(self, numbers: abc.Iterable[int], step: int) -> Batch:
        settings, texts = self.settings, [self.corpus.read(int(number)) for number in numbers]
        random = np.random.default_rng((settings.seed, 1, step))
        return collate(texts, settings.max_length, settings.prompt_share, random, self.device)

    def _weights(self) -> contextlib.AbstractContextManager[None]:
        """In which they are what they are or, in the end, what a draft will make of them."""
        if self.state.rounded_from is None:
            return contextlib.nullcontext()
        return rounded_weights(self.decoder, self.settings.block_size)

    def _hidden(self, batch: Batch) -> Tensor:
        hidden: Tensor = self.decoder(batch.tokens)
        return hidden.flatten(0, 1).index_select(0, batch.places)

    def _begin_epoch(self) -> None:
        self.batches = self._epoch(self.state.epoch)

    def _epoch(self, number: int) -> list[Numbers]:
        most = self.settings.batch_size * self.settings.max_length
        return epoch(self.numbers, self.lengths, most, self.settings.seed, number)

    # -------------------------------------------------------------------------------------------------- how long yet

    def _num_steps(self, epochs: float) -> int:
        whole = sum(len(self._epoch(number)) for number in range(int(epochs)))
        return max(1, whole + round((epochs % 1) * len(self._epoch(int(epochs)))))

    @property
    def _left_s(self) -> float:
        return float("inf") if self.settings.hours is None else 3600 * self.settings.hours - self.state.seconds_s

    def _is_spent(self, seconds_s: float) -> bool:
        """Whether too little time is left for it to be worth giving up a decay."""
        hours = self.settings.hours
        return hours is not None and 3600 * hours - seconds_s < DECAY_SHARE / 3 * 3600 * hours

    def _clock(self) -> None:
        """All that was done since the last time counts: looks and checkpoints, too."""
        state, now_s = self.state, time.monotonic()
        step_s, self.clock_s = now_s - self.clock_s, now_s
        state.seconds_s += step_s
        state.step_s += (step_s - state.step_s) * (_SMOOTHING if state.step_s else 1.0)

    def _is_over(self) -> bool:
        """Begins the decay, and rounding, when its time has come, and hurries it when the clock does."""
        state = self.state
        if state.schedule.decay_from is None and self._is_decay_due():
            self._save("stable")
            num_steps = max(self._steps_left(), round(MIN_DECAY * state.step))
            state.schedule = state.schedule.decaying(state.step, state.step + num_steps)
            state.rounded_from = None if self.settings.round_to is None else state.step
        elif (
            state.schedule.num_steps is not None
            and state.schedule.num_steps - state.step > 1.1 * self._steps_left() + 1
        ):
            state.schedule = state.schedule.decaying(state.step, state.step + self._steps_left())
        return state.schedule.is_over(state.step)

    def _is_decay_due(self) -> bool:
        state, hours = self.state, self.settings.hours
        by_steps = self.most_steps is not None and state.step >= round((1 - DECAY_SHARE) * self.most_steps)
        return by_steps or (hours is not None and self._left_s <= DECAY_SHARE * 3600 * hours)

    def _steps_left(self) -> int:
        most = float("inf") if self.most_steps is None else self.most_steps - self.state.step
        by_clock = self._left_s / self.state.step_s if self.state.step_s else float("inf")
        return max(0, int(min(most, by_clock)))

    def _stage(self) -> str:
        last = self.points[-1]
        return f"train: {last.agreement:.1%} agree, loss {last.held_out_loss:.3f} at step {last.step}"

    def _fraction(self) -> float:
        state, hours = self.state, self.settings.hours
        by_steps = 0.0 if self.most_steps is None else state.step / self.most_steps
        by_clock = 0.0 if hours is None else state.seconds_s / (3600 * hours)
        return min(1.0, max(by_steps, by_clock))

    # ------------------------------------------------------------------------------------------------------ measuring

    def _look(self) -> None:
        """Add a point: the same held-out texts every time."""
        state, found = self.state, self._compare()
        self._check_finite(found.loss)
        rate = self.settings.learning_rate * state.schedule.factor(max(0, state.step - 1)) if state.step else 0.0
        self.points.append(
            Point(
                step=state.step,
                num_tokens=state.num_tokens,
                seconds_s=state.seconds_s,
                learning_rate=rate,
                loss=state.loss / state.num_losses if state.num_losses else None,
                held_out_loss=found.loss / max(1, found.num_positions),
                held_out_hidden=found.hidden / max(1, found.num_positions),
                agreement=found.num_agreed / max(1, found.num_written),
            )
        )
        state.loss, state.num_losses = 0.0, 0

    @torch.no_grad()
    def _compare(self) -> Comparison:
        totals = np.zeros(len(Comparison._fields))
        with self._weights():
            for numbers in self._looked_at():
                batch = self._batch(numbers, 0)
                with torch.autocast(self.decoder.device.type, torch.bfloat16):
                    hidden = self._hidden(batch)
                totals += compare(self.decoder, hidden, batch.taught, self.head, batch.written)
        return Comparison(*totals[:2].tolist(), *totals[2:].astype(int).tolist())

    def _looked_at(self) -> abc.Iterator[Numbers]:
        """Batches of held-out texts, about eval_tokens of them."""
        order = np.random.default_rng(0).permutation(self.held_out)
        before = np.cumsum(self.lengths[order]) - self.lengths[order]
        chosen = order[before < self.settings.eval_tokens]
        return iter(epoch(chosen, self.lengths, self.settings.batch_size * self.settings.max_length, 0, 0))

    def history(self) -> History:
        num_steps = self.state.schedule.num_steps or self.most_steps or self.state.step + 1
        return History(tuple(self.points), num_steps, len(self.numbers), len(self.held_out), self.state.rounded_from)

    # ---------------------------------------------------------------------------------------------------- checkpoints

    def _finish(self) -> None:
        if self.points[-1].step < self.state.step:
            self._look()
        if self.saved_step < self.state.step:
            self._save()
        self.progress(self._stage(), 1.0)

    def _save(self, kind: checkpoint.Kind = "step") -> None:
        checkpoint.save(
            self.folder,
            self.state.step,
            {
                "settings": asdict(self.settings),
                "num_texts": len(self.corpus),
                "state": asdict(self.state),
                "points": [asdict(point) for point in self.points],
                "weights": {name: p.detach() for name, p in self.decoder.named_parameters() if p.requires_grad},
                "optimizer": self.optimizer.state_dict(),
            },
            kind,
        )
        if kind == "step":
            self.saved_step = self.state.step

    def resume(self) -> None:
        """From the newest checkpoint; a longer training from the one before the decay."""
        last = checkpoint.newest(self.folder)
        if last is None:
            return
        saved = checkpoint.load(last)
        self._check_texts(saved["num_texts"])
        grown = self.settings.check_resumes(saved["settings"]) or saved["num_texts"] != len(self.corpus)
        seconds_s, decays = saved["state"]["seconds_s"], saved["state"]["schedule"]["decay_from"] is not None
        stable = checkpoint.newest(self.folder, "stable")
        grown = grown and not (decays and self._is_spent(seconds_s))
        if grown and decays and stable is not None:
            saved = checkpoint.load(stable)
        self._restore(saved)
        self.state.seconds_s = seconds_s  # those after the decay began are spent all the same
        if grown:
            self._save()
        elif last.kind == "step":
            self.saved_step = last.step

    def _check_texts(self, num_before: int) -> None:
        if num_before > len(self.corpus):
            raise ModelFormatError(
                f"{self.folder} was trained on {num_before} texts, of which {len(self.corpus)} are there; bring the "
                "others back, or delete that folder to train from the start"
            )

    def _restore(self, saved: checkpoint.State) -> None:
        named = {name: p for name, p in self.decoder.named_parameters() if p.requires_grad}
        with torch.no_grad():
            for name, values in saved["weights"].items():
                named[name].copy_(values)
        self.optimizer.load_state_dict(saved["optimizer"])
        state = saved["state"]
        self.state = _State(**{**state, "schedule": Schedule(**state["schedule"])})
        self.points = [Point(**point) for point in saved["points"]]
        if saved["num_texts"] != len(self.corpus):  # the order of this epoch is another one now
            self.state.epoch, self.state.place = self.state.epoch + 1, 0


def _optimizer(parameters: abc.Sequence[torch.nn.Parameter], learning_rate: float) -> torch.optim.AdamW:
    """Matrices decay towards 0, norms and biases do not."""
    matrices, vectors = ([p for p in parameters if (p.ndim > 1) == is_matrix] for is_matrix in (True, False))
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=learning_rate, betas=BETAS, fused=True)
