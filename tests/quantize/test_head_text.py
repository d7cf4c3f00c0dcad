"""How a source's chats begin, and how a model is led to write some."""

from __future__ import annotations

import collections.abc as abc
import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from edgespec.core.sampling import one_hot
from edgespec.core.sequence import Cancelled, Draft, never
from edgespec.drafters.base import DraftRequest
from edgespec.errors import ModelFormatError
from quantize.head import choose_head
from quantize.head_text import TextSide, open_text_side
from quantize.head_writer import Writer
from quantize.source import open_source
from tests.tiny import CHAT_TEMPLATE, IM_END, IM_START, token_strings, write_gguf
from tests.tiny_hf import hf_tokenizer, write_checkpoint, write_json

TOKENS = token_strings(320)


def spelled(ids: abc.Sequence[int]) -> str:
    return "".join(TOKENS[token] for token in ids).replace("Ċ", "\n").replace("Ġ", " ")


def side_of(source: Path) -> TextSide:
    with open_text_side(source, open_source(source).tokens) as side:
        text = "the ünd <|im_end|>"  # usable within the block
        assert side.decode([IM_START, *side.encode(text), IM_END]) == text
        return side


def checkpoint(folder: Path, tokenizer_config: dict[str, Any], **changes: Any) -> Path:
    write_json(write_checkpoint(folder, **changes) / "tokenizer_config.json", tokenizer_config)
    return folder


@pytest.mark.parametrize("kind", ["gguf", "checkpoint"])
def test_how_chats_begin(kind: str, tmp_path: Path) -> None:
    side = side_of(write_gguf(tmp_path / "a.gguf") if kind == "gguf" else write_checkpoint(tmp_path / "a"))
    assert spelled(side.start) == "<|im_start|>user\n"
    assert spelled(side.bridge) == "<|im_end|>\n<|im_start|>assistant\n"
    assert spelled(side.again) == "<|im_end|>\n<|im_start|>user\n"
    assert IM_END in side.end_tokens
    assert side.special == {0, 1, 2}


@pytest.mark.parametrize("kind", ["gguf", "checkpoint"])
def test_where_there_are_no_chats(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text begins where another ended, unless the vocabulary has a token for it."""
    monkeypatch.setattr("gguf.GGUFWriter.add_chat_template", lambda self, template: None)
    eos = {"eos_token": "<|im_end|>"}
    side = side_of(write_gguf(tmp_path / "a.gguf") if kind == "gguf" else checkpoint(tmp_path / "a", eos))
    assert side.start == (min(side.end_tokens),)
    assert side.bridge == ()


@pytest.mark.parametrize("template", ["{{ nonsense", "{{ raise_exception('no') }}", "always the same"])
def test_a_template_of_no_use_is_none(template: str, tmp_path: Path) -> None:
    assert side_of(checkpoint(tmp_path / "a", {"chat_template": template, "eos_token": "<|im_end|>"})).bridge == ()


@pytest.mark.parametrize("place", ["text", "list", "file"])
def test_places_of_a_checkpoints_template(place: str, tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": CHAT_TEMPLATE}]
    content = {"text": CHAT_TEMPLATE, "list": named, "file": "another"}[place]
    folder = checkpoint(tmp_path / "a", {"chat_template": content})
    if place == "file":
        (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    assert spelled(side_of(folder).start) == "<|im_start|>user\n"


def test_spaces_before_a_users_words_belong_to_them(tmp_path: Path) -> None:
    template = "{{ bos_token }}[INST] {{ messages[0].content | trim }} [/INST]"
    folder = checkpoint(tmp_path / "a", {"chat_template": template, "bos_token": {"content": "<|im_start|>"}})
    side = side_of(folder)
    assert spelled(side.start) == "<|im_start|>[INST]"
    assert spelled(side.bridge) == " [/INST]"


@pytest.mark.parametrize("template", ["{{ messages[0].content }}?", "<|im_start|>{{ messages[0].content }}?"])
def test_a_token_that_begins_texts_stands_there_once(template: str, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "a", {"chat_template": template})
    pieces: list[dict[str, Any]] = [
        {"SpecialToken": {"id": "<|im_start|>", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
    ]
    special = {"<|im_start|>": {"id": "<|im_start|>", "ids": [IM_START], "tokens": ["<|im_start|>"]}}
    processor = {"type": "TemplateProcessing", "single": pieces, "pair": pieces, "special_tokens": special}
    write_json(folder / "tokenizer.json", hf_tokenizer() | {"post_processor": processor})
    assert side_of(folder).start == (IM_START,)


def test_end_tokens_of_a_checkpoint(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "a", {"eos_token": "Ġthe"}, eos_token_id=7)
    write_json(folder / "generation_config.json", {"eos_token_id": [0, 5, 9999, -1, None, True, "2"]})
    assert side_of(folder).end_tokens == {0, 5, 7, TOKENS.index("Ġthe")}


def test_special_tokens_for_padding_are_not_kept(tmp_path: Path) -> None:
    folder, tokenizer = write_checkpoint(tmp_path / "a"), hf_tokenizer()
    names = ["<|reserved_special_token_7|>", "<unused12>", "<tool>"]
    tokenizer["added_tokens"] += [
        {**tokenizer["added_tokens"][0], "id": 274 + i, "content": name} for i, name in enumerate(names)
    ]
    write_json(folder / "tokenizer.json", tokenizer)
    assert side_of(folder).special == {0, 1, 2, 276}


def test_a_tokenizer_that_reads_nothing(tmp_path: Path) -> None:
    folder, tokenizer = write_checkpoint(tmp_path / "a"), hf_tokenizer()
    tokenizer["model"] = {"type": "WordLevel", "vocab": {"a": 3}, "unk_token": "[UNK]"}
    write_json(folder / "tokenizer.json", tokenizer)
    with pytest.raises(ModelFormatError, match=r"tokenizer\.json reads no text: "):
        choose_head(folder, 10)


@pytest.mark.parametrize("name", ["tokenizer_config.json", "generation_config.json"])
def test_a_broken_file_is_named(name: str, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "a")
    (folder / name).write_text("{", encoding="utf-8")
    with pytest.raises(ModelFormatError, match=f"{name} is not JSON"):
        choose_head(folder, 10)


# -------------------------------------------------------------------------------------------------------------- writer


class Scripted:
    """Writes 9, 9, ... and the end token where a text's own script says so; keeps what it was asked."""

    name, num_slots, num_ctx = "scripted", 2, 256

    def __init__(self, length: abc.Callable[[int], int]) -> None:
        self.length, self.requests = length, list[DraftRequest]()

    def propose(self, requests: abc.Sequence[DraftRequest], cancelled: Cancelled = never) -> list[Draft]:
        self.requests += [self._copy(request) for request in requests]
        return [self._propose(request) for request in requests]

    def _copy(self, request: DraftRequest) -> DraftRequest:
        return DraftRequest(request.slot, tuple(request.tokens), 0, request.num_draft, request.params)

    def _propose(self, request: DraftRequest) -> Draft:
        start, tokens = len(request.tokens), list(request.tokens)
        while len(tokens) - start < request.num_draft and tokens[-1] != IM_END:
            run = next((i for i, token in enumerate(reversed(tokens)) if token != 9), 0)
            tokens.append(IM_END if run == self.length(request.slot) else 9)
        drafted = tuple(tokens[start:])
        return Draft(start, drafted, tuple(one_hot(token) for token in drafted))

    def close(self) -> None: ...


SIDE = TextSide(lambda text: [], lambda ids: "", frozenset({IM_END}), frozenset(), (1, 50), (IM_END, 60, 61))


def test_a_user_asks_and_is_answered() -> None:
    drafter = Scripted(lambda slot: (3, 40)[slot])
    pieces = list(islice(Writer(drafter, SIDE, 256, 0).pieces(), 12))
    asked = [request for request in drafter.requests if request.slot == 0][:3]
    question = (1, 50, 9, 9, 9)
    assert [request.tokens for request in asked] == [(1, 50), (*question, *SIDE.bridge), (1, 50)]
    assert asked[0].params.seed == asked[1].params.seed != asked[2].params.seed
    assert (pieces[0][0], pieces[0][1].tokens) == (0, (9, 9, 9, IM_END))
    assert [number for number, _ in pieces[::2]] == [0, 0, 2, 2, 3, 3]
    assert [number for number, _ in pieces[1::2]] == [1] * 6


def test_words_without_end_are_cut() -> None:
    drafter = Scripted(lambda slot: 10_000)
    pieces = list(islice(Writer(drafter, SIDE, 256, 0).pieces(), 160))
    lengths = [len(request.tokens) for request in drafter.requests if request.slot == 0]
    assert lengths[22:27] == [90, 94, 101, 105, 109]  # 96 tokens asked, then the bridge
    assert max(lengths) + 4 >= 256
    assert all(len(request.tokens) + request.num_draft <= 256 for request in drafter.requests)
    assert {number for number, _ in pieces} == {0, 1, 2, 3}


def test_running_text_is_written_to_the_end_of_the_context() -> None:
    side = TextSide(SIDE.encode, SIDE.decode, SIDE.end_tokens, SIDE.special, (1,), ())
    drafter = Scripted(lambda slot: 10_000)
    list(islice(Writer(drafter, side, 12, 0).pieces(), 8))
    asked = [(len(request.tokens), request.num_draft) for request in drafter.requests if request.slot == 0]
    assert asked == [(1, 4), (5, 4), (9, 3), (1, 4)]


def test_seeds_of_texts_differ() -> None:
    seeds = set[int | None]()
    for seed in (0, 1, 2**70):
        drafter = Scripted(lambda slot: 1)
        list(islice(Writer(drafter, SIDE, 256, seed).pieces(), 60))
        seeds |= {request.params.seed for request in drafter.requests}
    assert len(seeds) > 40


# ---------------------------------------------------------------------------------------------------------------- real


@pytest.mark.model
@pytest.mark.slow
def test_the_starter_model(starter_gguf: Path, tmp_path: Path) -> None:
    source = open_source(starter_gguf)
    with open_text_side(starter_gguf, source.tokens) as side:
        assert [source.tokens[token] for token in side.start[-3:]] == ["<|im_start|>", "user", "Ċ"]
        assert [source.tokens[token] for token in side.bridge][:4] == ["<|im_end|>", "Ċ", "<|im_start|>", "ass"]
        assert len(side.special) == 17
    written = choose_head(starter_gguf, 4096, num_tokens=1500)
    common = {
        token for token, text in enumerate(source.tokens) if text in ("Ġthe", "Ġand", ",", ".", "Ċ", "<|im_end|>")
    }
    assert common <= set(written.ids)
    assert 0.6 < written.coverage < 1.0
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text(json.dumps({"text": "The quick brown fox jumps over the lazy dog. "}) + "\n", encoding="utf-8")
    read = choose_head(starter_gguf, 30, corpus=[corpus])
    assert {"Ġquick", "Ġbrown", "Ġfox"} <= {source.tokens[token] for token in read.ids}
