"""A vocabulary without its model."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgespec.errors import ModelFormatError
from edgespec.text.tokenizer import Tokenizer
from edgespec.verifiers.llama import LlamaOptions, LlamaVerifier
from edgespec.verifiers.llama_vocabulary import open_vocabulary
from tests.tiny import CHAT_TEMPLATE, token_strings


def test_it_reads_text_as_the_whole_model_does(tiny_gguf: Path) -> None:
    text = "the king <|im_start|> and\n"
    verifier = LlamaVerifier(LlamaOptions(tiny_gguf, 1))
    expected = Tokenizer(verifier.model).encode_chat(text)
    verifier.close()
    for _ in range(2):
        with open_vocabulary(tiny_gguf) as model:
            tokenizer = Tokenizer(model)
            assert tokenizer.encode_chat(text) == expected
            assert tokenizer.chat_template == CHAT_TEMPLATE
            assert tokenizer.tokens == token_strings(320)
            assert tokenizer.end_tokens >= {2}


def test_two_at_once(tiny_gguf: Path) -> None:
    with open_vocabulary(tiny_gguf) as first, open_vocabulary(tiny_gguf) as second:
        assert Tokenizer(first).encode_chat("the") == Tokenizer(second).encode_chat("the")


def test_a_file_that_llama_cpp_refuses(tiny_gguf: Path, tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(tiny_gguf.read_bytes()[:3000])
    with (
        pytest.raises(ModelFormatError, match=r"cut\.gguf: llama.cpp cannot load this GGUF") as caught,
        open_vocabulary(path),
    ):
        pass
    assert "\n" not in str(caught.value)
