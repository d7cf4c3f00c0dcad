from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from edgespec.drafters import vocabulary
from edgespec.errors import FileAccessError, ModelFormatError, ModelNotFoundError, VocabularyMismatchError
from tests.tiny import token_strings

TOKENS = token_strings(290)


@pytest.mark.parametrize(
    "draft",
    [
        pytest.param(TOKENS, id="same"),
        pytest.param(token_strings(400), id="draft padded further"),
        pytest.param(token_strings(0), id="draft not padded"),
        pytest.param(TOKENS[:200], id="draft lacks real tokens at the end"),
        pytest.param([*TOKENS[:5], "", "[PAD6]", *TOKENS[7:]], id="draft lacks real tokens in the middle"),
        pytest.param([*TOKENS, "<unused3>", "<|reserved_special_token_7|>", "<|extra_1|>"], id="other padding names"),
    ],
)
def test_fits(draft: list[str]) -> None:
    vocabulary.check(draft, TOKENS)


def test_user_defined_spaces_are_spelled_in_two_ways() -> None:
    vocabulary.check(["a", "\u2581\u2581"], ["a", "  "])


def test_a_different_token_is_named_with_both_texts_and_sizes() -> None:
    draft = [*TOKENS[:7], "other", "another", *TOKENS[9:], "[PAD290]"]
    with pytest.raises(VocabularyMismatchError) as caught:
        vocabulary.check(draft, TOKENS)
    message = str(caught.value)
    assert f"token 7 is 'other' in the draft's list of 291 and {TOKENS[7]!r} in the verifier's list of 290" in message
    assert "use a draft model made for this verifier" in message
    assert "\n" not in message


def test_real_tokens_the_verifier_lacks_are_refused() -> None:
    with pytest.raises(VocabularyMismatchError, match="'<think>' in the draft's list of 291 and missing"):
        vocabulary.check([*TOKENS, "<think>"], TOKENS)
    with pytest.raises(VocabularyMismatchError, match=r"'<think>' in the draft's list of 290 and '\[PAD289\]'"):
        vocabulary.check([*TOKENS[:-1], "<think>"], TOKENS)


def test_nothing_but_padding_says_nothing() -> None:
    with pytest.raises(VocabularyMismatchError, match="no real one"):
        vocabulary.check(["", "[PAD1]"], ["a", "b"])


@pytest.mark.parametrize(
    "text", ["", "[PAD151937]", "<unused12>", "<|reserved_200000|>", "<extra_id_3>", "<pad>", "<|dummy_4|>"]
)
def test_padding(text: str) -> None:
    assert vocabulary.is_padding(text)


@pytest.mark.parametrize("text", ["pad", "[", "<s>", "<|im_end|>", "<think>", "Ġreserved", "[PADDLE]", " ", "<0x0A>"])
def test_not_padding(text: str) -> None:
    assert not vocabulary.is_padding(text)


def write(path: Path, content: Any) -> Path:
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (["a", "", "Ġb"], ("a", "", "Ġb")),
        ({"model": {"vocab": {"b": 2, "a": 0}}}, ("a", "", "b")),
        ({"model": {"vocab": [["a", 0.0], ["▁b", -1.5]]}, "added_tokens": []}, ("a", "▁b")),
        (
            {
                "model": {"vocab": {"a": 0, "b": 1}},
                "added_tokens": [{"id": 1, "content": "<s>"}, {"id": 3, "content": "c"}],
            },
            ("a", "<s>", "", "c"),
        ),
    ],
    ids=["list", "map", "unigram", "added tokens win"],
)
def test_load(tmp_path: Path, content: Any, expected: tuple[str, ...]) -> None:
    assert vocabulary.load_tokens(write(tmp_path / "tokens.json", content)) == expected


@pytest.mark.parametrize(
    "content",
    [
        [],
        [1, 2],
        {},
        "text",
        None,
        {"model": {"vocab": {"a": "x"}}},
        {"model": {"vocab": {"a": -1}}},
        {"model": {"vocab": {"a": 10**12}}},
        {"model": {"vocab": ["a"]}},
        {"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": 1}]},
    ],
)
def test_what_is_no_token_list(tmp_path: Path, content: Any) -> None:
    with pytest.raises(ModelFormatError, match=r"tokens.json is no token list \(.*expected a JSON list") as caught:
        vocabulary.load_tokens(write(tmp_path / "tokens.json", content))
    assert "\n" not in str(caught.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError):
        vocabulary.load_tokens(tmp_path / "absent.json")
    with pytest.raises(FileAccessError):
        vocabulary.load_tokens(tmp_path)
    (tmp_path / "latin.json").write_bytes(b'["\xe9"]')
    with pytest.raises(ModelFormatError, match="not UTF-8"):
        vocabulary.load_tokens(tmp_path / "latin.json")
    (tmp_path / "cut.json").write_text('["a", "b', encoding="utf-8")
    with pytest.raises(ModelFormatError, match="no token list"):
        vocabulary.load_tokens(tmp_path / "cut.json")


def test_the_tokenizer_beside_an_export_or_one_folder_up(tmp_path: Path) -> None:
    model = tmp_path / "onnx" / "model.onnx"
    model.parent.mkdir()
    with pytest.raises(VocabularyMismatchError, match=r"put the model's tokenizer.json into .*onnx"):
        vocabulary.tokenizer_beside(model)
    above = write(tmp_path / "tokenizer.json", ["a"])
    assert vocabulary.tokenizer_beside(model) == above
    beside = write(model.parent / "tokenizer.json", ["a"])
    assert vocabulary.tokenizer_beside(model) == beside
