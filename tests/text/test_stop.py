from __future__ import annotations

import random

import pytest

from edgespec.text.stop import StopScanner


def run(stops: tuple[str, ...], chunks: list[str]) -> tuple[str, bool]:
    scanner = StopScanner(stops)
    parts = [scanner.feed(chunk) for chunk in chunks]
    return "".join(emit for emit, _ in parts) + scanner.flush(), any(stopped for _, stopped in parts)


def reference(stops: tuple[str, ...], text: str) -> tuple[str, bool]:
    """Grow the text a character at a time; the first moment it ends in a stop string, cut the longest such off."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: end - max(map(len, ending))], True
    return text, False


@pytest.mark.parametrize(
    ("stops", "text", "emitted", "stopped"),
    [
        ((), "anything", "anything", False),
        (("END",), "the END of it", "the ", True),
        (("END",), "END", "", True),
        (("END",), "EN END", "EN ", True),
        (("END",), "the EN", "the EN", False),
        (("aab",), "aaab", "a", True),
        (("aab", "aaab"), "aaab", "", True),
        (("aaab", "aab"), "xaaab", "x", True),
        (("ab", "abc"), "xabc", "x", True),
        (("abc", "ab"), "xabc", "x", True),
        (("abcde", "c"), "abcde", "ab", True),
        (("\n\n",), "a\nb\n\nc", "a\nb", True),
        (("é🙂",), "éé🙂", "é", True),
    ],
)
@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_text_before_the_stop(stops: tuple[str, ...], text: str, emitted: str, stopped: bool, size: int) -> None:
    chunks = [text[i : i + size] for i in range(0, len(text), size)]
    assert run(stops, chunks) == (emitted, stopped)


@pytest.mark.parametrize("seed", range(10))
def test_agrees_with_the_reference_however_the_text_is_cut(seed: int) -> None:
    rng = random.Random(seed)
    met = 0
    for _ in range(1000):
        text = "".join(rng.choices("abc", k=rng.randrange(12)))
        stops = tuple("".join(rng.choices("abc", k=rng.randrange(1, 6))) for _ in range(rng.randrange(4)))
        cuts = sorted(rng.choices(range(len(text) + 1), k=rng.randrange(6)))
        chunks = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        expected = reference(stops, text)
        assert run(stops, chunks) == expected, (stops, chunks)
        met += expected[1]
    assert 100 < met < 900  # both outcomes were tried


def test_holds_back_only_what_could_begin_a_stop() -> None:
    scanner = StopScanner(("</s>", "stop"))
    assert scanner.feed("a <") == ("a ", False)
    assert scanner.feed("/") == ("", False)
    assert scanner.feed("b> st") == ("</b> ", False)
    assert scanner.feed("st") == ("st", False)
    assert scanner.feed("op more") == ("", True)


def test_nothing_after_the_stop() -> None:
    scanner = StopScanner(("x",))
    assert scanner.feed("axb") == ("a", True)
    assert scanner.feed("more") == ("", True)
    assert scanner.flush() == ""


def test_flush_gives_the_held_text_once() -> None:
    scanner = StopScanner(("stop",))
    assert scanner.feed("sto") == ("", False)
    assert (scanner.flush(), scanner.flush()) == ("sto", "")
