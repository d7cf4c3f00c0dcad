from __future__ import annotations

import random

import pytest

from edgespec.text.detokenizer import Detokenizer
from edgespec.text.output import OutputText, Text


def byte(token: int) -> bytes:
    """A vocabulary of the 256 bytes; what lies above stands for nothing, as a special token does."""
    return bytes([token]) if token < 256 else b""


def test_a_character_is_held_until_whole() -> None:
    detokenizer = Detokenizer(byte)
    grin = "🙂".encode()
    assert [detokenizer.feed([value]) for value in grin] == ["", "", "", "🙂"]
    assert detokenizer.flush() == ""


def test_special_tokens_between_the_bytes_of_a_character() -> None:
    first, second = "é".encode()
    assert Detokenizer(byte).feed([300, first, 301, second, 302]) == "é"


def test_invalid_bytes_become_replacement_characters_as_soon_as_known() -> None:
    detokenizer = Detokenizer(byte)
    assert detokenizer.feed([0xFF]) == "\ufffd"
    assert detokenizer.feed([0xF0, 0x9F]) == ""
    assert detokenizer.feed([ord("a")]) == "\ufffda"


def test_flush_ends_an_unfinished_character_and_begins_anew() -> None:
    detokenizer = Detokenizer(byte)
    assert detokenizer.feed([ord("a"), 0xE2, 0x82]) == "a"
    assert (detokenizer.flush(), detokenizer.flush()) == ("\ufffd", "")
    assert detokenizer.feed([0xAC, ord("b")]) == "\ufffdb"


@pytest.mark.parametrize("seed", range(5))
def test_any_cut_of_any_bytes_decodes_as_one(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(500):
        data = bytes(rng.choices([*"aé€🙂".encode(), 0xFF, 0xC0, 0xED, 0xA0], k=rng.randrange(12)))
        detokenizer, text, start = Detokenizer(byte), "", 0
        while start < len(data):
            end = start + rng.randrange(4)
            text, start = text + detokenizer.feed(data[start:end]), end
        assert text + detokenizer.flush() == data.decode("utf-8", "replace")


def pieces(*texts: bytes) -> OutputText:
    return OutputText(lambda token: texts[token], ("STOP",))


def test_num_tokens_counts_up_to_the_token_that_completes_the_stop() -> None:
    output = pieces(b"one ", b"S", b"TO", b"P two", b"three")
    assert output.feed([0, 1]) == Text("one ", 2, False)
    assert output.feed([2, 3, 4]) == Text("", 2, True)
    assert output.feed([4]) == Text("", 0, True)
    assert output.flush() == ""


def test_stop_in_the_first_token() -> None:
    assert pieces(b"STOP", b"x").feed([0, 1]) == Text("", 1, True)


def test_without_stops_all_tokens_are_read() -> None:
    output = OutputText(byte)
    assert output.feed([]) == Text("", 0, False)
    assert output.feed([*b"hi", 300]) == Text("hi", 3, False)


def test_flush_gives_held_text_then_the_unfinished_character() -> None:
    output = pieces(b"ST", b"\xe2\x82")
    assert output.feed([0, 1]) == Text("", 2, False)
    assert output.flush() == "ST\ufffd"


def test_a_stop_that_flush_completes_is_cut_off() -> None:
    output = OutputText(byte, ("a\ufffd",))
    assert output.feed([*b"ba", 0xE2]) == Text("b", 3, False)
    assert output.flush() == ""


def test_cutting_the_run_elsewhere_changes_nothing() -> None:
    rng = random.Random(0)
    text = "aé🙂STSTOP after".encode()
    for _ in range(200):
        output, emitted, used, start = OutputText(byte, ("STOP", "xx")), "", 0, 0
        while start < len(text):
            end = start + rng.randrange(1, 7)
            got = output.feed(text[start:end])
            emitted, used, start = emitted + got.emit, used + got.num_tokens, end
        assert (emitted + output.flush(), used) == ("aé🙂ST", text.index(b" after"))
