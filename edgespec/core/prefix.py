"""The prefix rule's comparison: what a cache holds against the whole token list it is asked to hold."""

from __future__ import annotations


def num_common(held: list[int], tokens: list[int]) -> int:
    """How many tokens two lists share from the start.

    Bisects with slice comparisons, which run at C speed: tens of microseconds for thousands of tokens. It looks near
    the end first, where a cache and the list that continues it usually part.
    """
    high = min(len(held), len(tokens))
    low = max(high - 32, 0)
    if held[:low] != tokens[:low]:
        low, high = 0, low
    elif held[low:high] == tokens[low:high]:
        return high
    while high - low > 1:  # the first low tokens are equal, the first high are not
        middle = (low + high) // 2
        if held[low:middle] == tokens[low:middle]:
            low = middle
        else:
            high = middle
    return low
