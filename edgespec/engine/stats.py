"""What a request cost and how speculation went."""

from __future__ import annotations

import time
from dataclasses import dataclass

from edgespec.core.sequence import Round


@dataclass(frozen=True, slots=True)
class Stats:
    """Counts and times of one request, so far.

    mode          the loop that ran
    seed          the seed that gives the same tokens again
    rounds        verifier evaluations that committed tokens
    tokens_per_s  tokens committed after the first round, per second after it; over the whole request while there is
                  only one round
    ttft_s        time to first token: from the first ``next`` of the stream to the end of the first round
    draft_s, verify_s  seconds inside the drafter and inside the verifier (prompt evaluation included); work that was
                  shared with other requests counts whole
    hidden_s      of draft_s, what passed while the verifier worked
    speedup       tokens committed after the first round, over what plain decoding would have made in that time by the
                  live estimate of its speed; 0.0 where there is none yet
    """

    prompt_tokens: int
    mode: str = "plain"
    seed: int | None = None
    completion_tokens: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    tokens_per_s: float = 0.0
    ttft_s: float = 0.0
    draft_s: float = 0.0
    verify_s: float = 0.0
    hidden_s: float = 0.0
    speedup: float = 0.0

    @property
    def acceptance_rate(self) -> float:
        """accepted / drafted; 0.0 where nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def tokens_per_round(self) -> float:
        return self.completion_tokens / self.rounds if self.rounds else 0.0


class Tally:
    """Adds up rounds. One thread.

    began  when the request started, by time.perf_counter(); may be set until the first round
    """

    def __init__(self, num_prompt: int, mode: str, seed: int | None, began: float = 0.0) -> None:
        self.began = began
        self._num_prompt, self._mode, self._seed = num_prompt, mode, seed
        self._rounds = self._tokens = self._drafted = self._accepted = self._first_tokens = 0
        self._first_s = self._draft_s = self._verify_s = self._hidden_s = 0.0
        self._elapsed_s = self._plain_s = 0.0

    def add(self, round_: Round, num_tokens: int, plain_s: float = 0.0) -> Stats:
        """Count a finished round of which ``num_tokens`` tokens were kept.

        plain_s  what a token costs by plain decoding, 0.0 where nobody knows
        """
        self._elapsed_s = time.perf_counter() - self.began
        self._rounds += 1
        self._tokens += num_tokens
        self._drafted += round_.drafted
        self._accepted += min(round_.accepted, num_tokens)
        self._draft_s += round_.draft_s
        self._verify_s += round_.verify_s
        self._hidden_s += round_.hidden_s
        if self._rounds > 1:
            self._plain_s += num_tokens * plain_s
        else:
            self._first_s, self._first_tokens = self._elapsed_s, num_tokens
        return self.stats

    @property
    def stats(self) -> Stats:
        return Stats(
            prompt_tokens=self._num_prompt,
            mode=self._mode,
            seed=self._seed,
            completion_tokens=self._tokens,
            rounds=self._rounds,
            drafted=self._drafted,
            accepted=self._accepted,
            tokens_per_s=self._rate(),
            ttft_s=self._first_s,
            draft_s=self._draft_s,
            verify_s=self._verify_s,
            hidden_s=self._hidden_s,
            speedup=self._speedup(),
        )

    def _speedup(self) -> float:
        seconds = self._elapsed_s - self._first_s
        return self._plain_s / seconds if seconds > 0 else 0.0

    def _rate(self) -> float:
        tokens, seconds = self._tokens, self._elapsed_s
        if self._rounds > 1:
            tokens, seconds = tokens - self._first_tokens, seconds - self._first_s
        return tokens / seconds if seconds > 0 else 0.0
