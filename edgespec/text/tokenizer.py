"""The verifier's tokenizer: text to token ids and back to bytes, as llama.cpp does it."""

from __future__ import annotations

import ctypes
from functools import cached_property
from typing import Any

from edgespec.errors import ModelFormatError, ParameterError, PromptError

MAX_TEXT_BYTES = 2**31 - 1  # llama_tokenize counts in int32


class Tokenizer:
    """The vocabulary of a loaded ``llama_model*``.

    The model stays the property of whoever loaded it and must outlive the tokenizer. Any thread may call any method at
    any time: llama.cpp only reads the vocabulary, and the caches here are filled with values that never differ.
    """

    def __init__(self, model: Any) -> None:
        """Raises ModelFormatError for a model without a tokenizer (llama.cpp would abort at the first text)."""
        import llama_cpp

        self._lib: Any = llama_cpp
        self._model = model
        self._vocab = llama_cpp.llama_model_get_vocab(model)
        self._pieces: dict[tuple[int, bool], bytes] = {}
        if llama_cpp.llama_vocab_type(self._vocab) == llama_cpp.LLAMA_VOCAB_TYPE_NONE:
            raise ModelFormatError("the verifier has no tokenizer: its GGUF must hold one (tokenizer.ggml.model)")
        self.num_vocab: int = llama_cpp.llama_vocab_n_tokens(self._vocab)

    def encode(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """Token ids of a text of any length; NUL is a character like any other.

        add_special    put the tokens around it that the vocabulary asks for (BOS, rarely EOS)
        parse_special  read the spelling of a special token (``<|im_end|>``) as that token, not as text
        Raises PromptError for text that is not Unicode (a lone surrogate) and for more than 2 GiB.
        """
        data = _utf8(text)
        num_max = len(data) + 8  # enough, unless the vocabulary's normalization makes the text longer
        num, tokens = self._tokenize(data, num_max, add_special, parse_special)
        if num < 0:
            num, tokens = self._tokenize(data, -num, add_special, parse_special)
        return list(tokens[:num])

    def encode_chat(self, text: str) -> list[int]:
        """Token ids of what a chat template rendered: special tokens are parsed, and BOS is never doubled.

        A template usually writes its own BOS. Where it does not and the vocabulary asks for one, it is added, as
        llama.cpp does. EOS is never added: the answer is yet to come.
        """
        tokens = self.encode(text, add_special=False, parse_special=True)
        bos = self._lib.llama_vocab_bos(self._vocab)
        if self._lib.llama_vocab_get_add_bos(self._vocab) and bos >= 0 and tokens[:1] != [bos]:
            tokens.insert(0, bos)
        return tokens

    def piece(self, token: int, *, special: bool = False) -> bytes:
        """The bytes a token stands for, often part of a character only.

        Special tokens (control, unknown) are b"" unless ``special`` asks for their spelling. Raises ParameterError for
        an id outside the vocabulary.
        """
        key = (token, special)
        if key not in self._pieces:
            self._check(token)
            self._pieces[key] = self._render(token, special)
        return self._pieces[key]

    @cached_property
    def tokens(self) -> list[str]:
        """The vocabulary's own spellings by token id, to compare with another's; bytes that are no UTF-8 are lone
        surrogates (``surrogateescape``)."""
        return [self._text(token) for token in range(self.num_vocab)]

    @cached_property
    def end_tokens(self) -> frozenset[int]:
        """Every token that ends generation (end of sequence, of turn, of message, ...)."""
        is_end = self._lib.llama_vocab_is_eog
        return frozenset(token for token in range(self.num_vocab) if is_end(self._vocab, token))

    @property
    def bos(self) -> str:
        """Spelling of the token that begins a sequence, "" if there is none."""
        return self._text(self._lib.llama_vocab_bos(self._vocab))

    @property
    def eos(self) -> str:
        """Spelling of the token that ends a sequence, "" if there is none."""
        return self._text(self._lib.llama_vocab_eos(self._vocab))

    @property
    def chat_template(self) -> str | None:
        """Jinja source of the model's default chat template, None if the GGUF holds none."""
        source: bytes | None = self._lib.llama_model_chat_template(self._model, None)
        return None if source is None else source.decode("utf-8", "replace")

    def _tokenize(self, data: bytes, num_max: int, add_special: bool, parse_special: bool) -> tuple[int, Any]:
        tokens = (ctypes.c_int32 * num_max)()
        num = self._lib.llama_tokenize(self._vocab, data, len(data), tokens, num_max, add_special, parse_special)
        return num, tokens

    def _render(self, token: int, special: bool, num_bytes: int = 64) -> bytes:
        buffer = ctypes.create_string_buffer(num_bytes)
        num = self._lib.llama_token_to_piece(self._vocab, token, buffer, num_bytes, 0, special)
        return self._render(token, special, -num) if num < 0 else buffer.raw[:num]

    def _text(self, token: int) -> str:
        if token < 0:  # LLAMA_TOKEN_NULL
            return ""
        text: bytes = self._lib.llama_vocab_get_text(self._vocab, token)
        return text.decode("utf-8", "surrogateescape")

    def _check(self, token: int) -> None:
        if not 0 <= token < self.num_vocab:
            raise ParameterError(f"token id: got {token}; the vocabulary has ids 0 to {self.num_vocab - 1}")


def _utf8(text: str) -> bytes:
    try:
        data = text.encode("utf-8")
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        raise PromptError(
            f"the text is not valid Unicode: lone surrogate U+{code:04X} at character {error.start}; remove it"
        ) from None
    if len(data) > MAX_TEXT_BYTES:
        raise PromptError(f"the text is too long: got {len(data)} bytes; at most {MAX_TEXT_BYTES}; cut it")
    return data
