from __future__ import annotations

import collections.abc as abc
import contextlib
import struct
import threading
from pathlib import Path

import pytest

from edgespec.errors import ModelFormatError, ParameterError, PromptError
from edgespec.text import ChatTemplate, Tokenizer
from tests import tiny

TEXTS = [
    "",
    "\0",
    "the cat and the hat",
    "a\0b",
    "  \n\t\r\n ",
    "é🙂中文𓀀",
    "e\u0301\u200d\ufeff\uffff\U0010ffff",
    "the " * 5000,
    "x" * 20000,
]


@contextlib.contextmanager
def open_tokenizer(path: Path) -> abc.Iterator[Tokenizer]:
    import llama_cpp

    params = llama_cpp.llama_model_default_params()
    params.vocab_only = True
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
    assert model
    try:
        yield Tokenizer(model)
    finally:
        llama_cpp.llama_model_free(model)


@pytest.fixture(scope="module")
def gguf_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_gguf(tmp_path_factory.mktemp("tokenizer") / "tiny.gguf")


@pytest.fixture(scope="module")
def tokenizer(gguf_path: Path) -> abc.Iterator[Tokenizer]:
    with open_tokenizer(gguf_path) as opened:
        yield opened


def patched(source: Path, target: Path, old: bytes, new: bytes) -> Path:
    """The GGUF with bytes replaced once; same length, so that it stays well-formed."""
    data = source.read_bytes()
    assert data.count(old) == 1
    assert len(old) == len(new)
    target.write_bytes(data.replace(old, new))
    return target


def with_add_bos(source: Path, target: Path) -> Path:
    key = b"tokenizer.ggml.add_bos_token" + struct.pack("<I", 7)  # 7: a boolean follows
    return patched(source, target, key + b"\0", key + b"\1")


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: ascii(text[:12]))
@pytest.mark.parametrize("parse_special", [False, True])
def test_pieces_join_to_the_text(tokenizer: Tokenizer, text: str, parse_special: bool) -> None:
    tokens = tokenizer.encode(text, add_special=False, parse_special=parse_special)
    assert b"".join(map(tokenizer.piece, tokens)) == text.encode()
    assert all(0 <= token < tokenizer.num_vocab for token in tokens)


def test_merges_are_used(tokenizer: Tokenizer) -> None:
    (token,) = tokenizer.encode(" the", add_special=False, parse_special=False)
    assert (tokenizer.tokens[token], tokenizer.piece(token)) == ("Ġthe", b" the")


def test_buffers_that_are_too_small_grow(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = tokenizer.encode("the hat in the cat", add_special=False, parse_special=False)
    tokenize, sizes = tokenizer._tokenize, iter([2, len(expected)])
    monkeypatch.setattr(tokenizer, "_tokenize", lambda data, num_max, *how: tokenize(data, next(sizes), *how))
    assert tokenizer.encode("the hat in the cat", add_special=False, parse_special=False) == expected
    assert tokenizer._render(tiny.IM_END, True, num_bytes=2) == b"<|im_end|>"


def test_special_tokens_are_parsed_only_on_request(tokenizer: Tokenizer) -> None:
    text = "<|im_end|>"
    assert tokenizer.encode(text, add_special=False, parse_special=True) == [tiny.IM_END]
    spelled = tokenizer.encode(text, add_special=False, parse_special=False)
    assert tiny.IM_END not in spelled
    assert b"".join(map(tokenizer.piece, spelled)) == text.encode()


def test_special_tokens_have_no_bytes_unless_asked_for(tokenizer: Tokenizer) -> None:
    assert tokenizer.piece(tiny.IM_END) == b""
    assert tokenizer.piece(tiny.IM_END, special=True) == b"<|im_end|>"
    assert tokenizer.piece(tiny.IM_END) == b""


@pytest.mark.parametrize("token", [-1, 320, 2**31])
def test_ids_outside_the_vocabulary_are_refused(tokenizer: Tokenizer, token: int) -> None:
    with pytest.raises(ParameterError, match="0 to 319"):
        tokenizer.piece(token)


def test_a_lone_surrogate_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(PromptError, match=r"U\+D800 at character 2"):
        tokenizer.encode("ab\ud800", add_special=True, parse_special=True)


def test_what_the_vocabulary_says_of_itself(tokenizer: Tokenizer) -> None:
    assert tokenizer.tokens == tiny.token_strings()
    assert tokenizer.num_vocab == 320
    assert (tokenizer.bos, tokenizer.eos) == ("<|im_start|>", "<|im_end|>")
    assert tokenizer.end_tokens == {tiny.END_OF_TEXT, tiny.IM_END}
    assert tokenizer.chat_template == tiny.CHAT_TEMPLATE


def test_bos_is_added_once(tokenizer: Tokenizer, gguf_path: Path, tmp_path: Path) -> None:
    bare, opened = "hat", "<|im_start|>hat"
    assert tokenizer.encode_chat(bare)[0] != tiny.IM_START
    with open_tokenizer(with_add_bos(gguf_path, tmp_path / "bos.gguf")) as adding:
        assert adding.encode("", add_special=True, parse_special=False) == [tiny.IM_START]
        assert adding.encode_chat(bare) == adding.encode_chat(opened) == tokenizer.encode_chat(opened)
        assert adding.encode_chat("") == [tiny.IM_START]


def test_a_model_without_a_chat_template(gguf_path: Path, tmp_path: Path) -> None:
    path = patched(gguf_path, tmp_path / "raw.gguf", b"tokenizer.chat_template", b"tokenizer.hidden_layout")
    with open_tokenizer(path) as bare:
        assert bare.chat_template is None


def test_a_model_without_a_tokenizer_is_refused(gguf_path: Path, tmp_path: Path) -> None:
    key = b"tokenizer.ggml.model" + struct.pack("<IQ", 8, 4)  # 8: a string of 4 bytes follows
    path = patched(gguf_path, tmp_path / "none.gguf", key + b"gpt2", key + b"none")
    with pytest.raises(ModelFormatError, match="no tokenizer"), open_tokenizer(path):
        pass


def test_several_threads_tokenize_at_once(tokenizer: Tokenizer) -> None:
    text = "the cat and the hat 🙂 " * 50
    expected = tokenizer.encode(text, add_special=False, parse_special=True)
    wrong: list[int] = []

    def work(index: int) -> None:
        for _ in range(50):
            tokens = tokenizer.encode(text, add_special=False, parse_special=True)
            if tokens != expected or b"".join(map(tokenizer.piece, tokens)) != text.encode():
                wrong.append(index)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.model
def test_the_starter_model_speaks_chatml(starter_gguf: Path) -> None:
    with open_tokenizer(starter_gguf) as starter:
        template = ChatTemplate(starter.chat_template, bos=starter.bos, eos=starter.eos)
        tokens = starter.encode_chat(template.render([{"role": "user", "content": "Hi 🙂"}]))
        spelled = b"".join(starter.piece(token, special=True) for token in tokens).decode()
        assert starter.num_vocab == 49152
        assert starter.end_tokens >= {0, 2}
        assert spelled.startswith("<|im_start|>system\n")
        assert spelled.endswith("<|im_start|>user\nHi 🙂<|im_end|>\n<|im_start|>assistant\n")
        assert b"".join(map(starter.piece, tokens)).decode().endswith("user\nHi 🙂\nassistant\n")
