"""The prompts a teacher gets: every slot filled, every kind there, the same again for the same seed."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from edgespec.errors import FileAccessError, ParameterError
from quantize.distill.prompts import (
    ENTRY,
    GOES_ON,
    NEWS,
    PASSAGE_TASKS,
    SHARES,
    FilePrompts,
    OwnPrompts,
    Passage,
    Script,
    Turn,
    as_passage,
)
from quantize.distill.words import Filler, load_sections, read_sections

FILES = ("topics.txt", "sentences.txt", "tasks.txt")
NEWS_TEXT = "Police found a dog. It had walked far. " * 12
PASSAGES = [
    Passage(NEWS, "A dog", NEWS_TEXT.strip()),
    Passage(ENTRY, "Rome", "Rome is a city. It is old. " * 20),
    Passage(ENTRY, "Tea", "Tea is a drink. It is hot. " * 20),
]
OWN = OwnPrompts()


def scripts(task: str, num: int = 200) -> list[Script]:
    return [OWN.script(task, number, np.random.default_rng((7, number)), PASSAGES) for number in range(num)]


# --------------------------------------------------------------------------------------------------------------- words


def test_sections_of_a_file() -> None:
    sections = read_sections("# remark\n[a]\n one\\ntwo \n\n# another\nthree\n[b]\n{a}\n[a]\nfour\n")
    assert sections == {"a": ("one\ntwo", "three", "four"), "b": ("{a}",)}


def test_slots_are_filled() -> None:
    sections = {"name": ("Ann", "Bob"), "who": ("{name} or {name2}",)}
    for seed in range(20):
        filler = Filler(sections, np.random.default_rng(seed), {"given": "it"})
        line = filler.fill("{who}: {name} has {3-5} {given}, not {30-30}; {} {1} {a-b}")
        found = re.fullmatch(r"(\w+) or (\w+): (\w+) has [345] it, not 30; \{\} \{1\} \{a-b\}", line)
        assert found is not None, line
        assert found[1] == found[3] != found[2]
        assert filler.fill("{name2}") == found[2]


def test_a_slot_of_no_section() -> None:
    with pytest.raises(KeyError, match="nothing"):
        Filler({"a": ("{nothing}",)}, np.random.default_rng(0)).line("a")


# Slots that passages fill, by task.
SPECIAL = {"news", "news2", "encyclopedia", "snippets", "snippet", "asked"}


def test_every_slot_of_the_shipped_files_is_known() -> None:
    sections = load_sections(*FILES)
    names = {name.rstrip("0123456789") for name in sections}
    for section, lines in sections.items():
        assert lines, section
        for line in lines:
            slots = re.findall(r"\{([a-zA-Z_]+)\d*\}", line)
            assert set(slots) <= names | {"news", "encyclopedia", "snippets", "snippet", "asked"}, line
            assert not re.search(r"[{}]", re.sub(r"\{\w+\}|\{\d+-\d+\}|\{\}", "", line)), line
            assert all(int(low) <= int(high) for low, high in re.findall(r"\{(\d+)-(\d+)\}", line)), line


def test_passages_are_asked_about_where_there_are_some() -> None:
    sections = load_sections(*FILES)
    asking = {
        name for name, lines in sections.items() for slot in SPECIAL if any(f"{{{slot}" in line for line in lines)
    }
    assert {name.removeprefix("more_") for name in asking} == PASSAGE_TASKS


@pytest.mark.parametrize("name", [*FILES])
def test_no_line_is_there_for_nothing(name: str) -> None:
    """Sections that no task reaches."""
    sections = load_sections(*FILES)
    reached, new = (
        set[str](),
        {*SHARES, *(f"more_{task}" for task in SHARES), "more", "passage", "entry_passage", "event"},
    )
    while new:
        reached |= new
        lines = [line for section in new for line in sections.get(section, ())]
        new = {slot for line in lines for slot in re.findall(r"\{([a-zA-Z_]+)\d*\}", line)} - reached
    assert set(load_sections(name)) <= reached


# ----------------------------------------------------------------------------------------------------------------- own


@pytest.mark.parametrize("task", SHARES)
def test_prompts_of_a_task(task: str) -> None:
    made = scripts(task)
    assert made == scripts(task)  # pure
    words = [turn.words for script in made for turn in script.turns]
    assert not any(GOES_ON in text for text in words)
    assert not any(re.search(r"\{[a-z0-9_]+(-\d+)?\}", text) for text in words)
    assert len(set(words)) >= (20 if task in PASSAGE_TASKS else 100)
    assert all(script.task == task for script in made)
    assert {len(script.turns) for script in made} == ({1} if task in ("translation", "question") else {1, 2})


def test_half_of_the_answers_are_the_likeliest() -> None:
    temperatures = [script.temperature for script in scripts("chat", 1000)]
    assert 0.45 < np.mean(np.array(temperatures) == 0) < 0.55
    assert all(temperature == 0 or 0.3 <= temperature <= 1 for temperature in temperatures)


def test_shares_are_whole() -> None:
    assert sum(SHARES.values()) == pytest.approx(1.0)


def test_summaries_hold_what_is_to_be_summarized() -> None:
    starts = Counter(script.turns[0].words[:10] for script in scripts("summary"))
    assert starts["Summarize:"] > 100
    assert all(any(p.text in script.turns[0].words for p in PASSAGES) for script in scripts("summary"))


def test_retrieval_asks_after_the_snippets() -> None:
    for script in scripts("retrieval"):
        text, _, question = script.turns[0].words.rpartition("\n")
        assert "Rome Rome is" in text or "Tea Tea is" in text or "It is" in text
        assert 0 < len(question) < 120
        assert "Police" not in text


def test_german_sentences_differ() -> None:
    starts = Counter(script.turns[0].words.split(":")[0] for script in scripts("translation", 400))
    assert starts["Translate German to English"] > 280
    assert len({script.turns[0].words for script in scripts("translation", 400) if not script.turns[0].goes_on}) > 250


def test_passages_to_be_written() -> None:
    titles = set()
    for number in range(60):
        title, script = OWN.passage_script((NEWS, ENTRY)[number % 2], np.random.default_rng(number))
        (turn,) = script.turns
        assert title[1:] in turn.words
        assert turn.answer
        assert not turn.goes_on
        assert script.max_answer is not None
        titles.add(title)
    assert len(titles) > 45


def test_a_passage_ends_with_a_sentence() -> None:
    assert as_passage(NEWS, "A", NEWS_TEXT + "\n\nHe said that").text == NEWS_TEXT.strip()
    assert as_passage(NEWS, "A", "\n 1. one\n\n2. two").text == "1. one 2. two"  # too little to cut
    assert as_passage(NEWS, "A", " \n").text == "A"


# ---------------------------------------------------------------------------------------------------------------- file


def test_a_users_prompts(tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    lines = [{"turns": ["a", "b"], "question_id": 3}, {"prompt": "{name} c"}, {"text": "d\ud800"}]
    path.write_text("\ufeff" + "\n\n".join(map(json.dumps, lines)), encoding="utf-8")
    prompts = FilePrompts(path)
    (task,) = prompts.shares
    turns = [prompts.script(task, number, np.random.default_rng(number), ()).turns for number in range(4)]
    assert turns == [(Turn("a"), Turn("b")), (Turn("{name} c"),), (Turn("d?"),), (Turn("a"), Turn("b"))]


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[1]",
        "3",
        "{}",
        '{"turns": []}',
        '{"turns": "a"}',
        '{"turns": [1]}',
        '{"prompt": ""}',
        '{"prompt": [" "]}',
        '{"text": null}',
        "[" * 100000,
    ],
)
def test_lines_that_are_no_prompts(line: str, tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    path.write_text('{"prompt": "a"}\n\n' + line, encoding="utf-8")
    with pytest.raises(ParameterError, match=r"prompts: line 3 of .*own\.jsonl") as raised:
        FilePrompts(path)
    assert "\n" not in str(raised.value)


def test_files_that_hold_no_prompts(tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    path.write_text("\n", encoding="utf-8")
    with pytest.raises(ParameterError, match="has no line"):
        FilePrompts(path)
    path.write_bytes(b"\xff\xff")
    with pytest.raises(ParameterError, match="not UTF-8"):
        FilePrompts(path)
    with pytest.raises(FileAccessError, match="cannot be read"):
        FilePrompts(tmp_path / "none")


def test_only_a_line_feed_ends_a_line(tmp_path: Path) -> None:
    path, texts = tmp_path / "own.jsonl", ["a\u2028b", "c\x85d", "e\u2029f"]
    lines = [json.dumps({"prompt": text}, ensure_ascii=False) for text in texts]
    path.write_bytes("\r\n".join(lines).encode("utf-8"))
    random = np.random.default_rng(0)
    assert [FilePrompts(path).script("prompts", i, random, ()).turns[0].words for i in range(3)] == texts


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="named pipes of POSIX")
def test_a_pipe_cannot_be_read_twice(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "own.jsonl")
    with pytest.raises(FileAccessError, match="no regular file"):
        FilePrompts(tmp_path / "own.jsonl")
