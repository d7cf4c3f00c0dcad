"""How text and the token ids of a source belong together: its tokenizer, its special tokens, how its chats begin."""

from __future__ import annotations

import collections.abc as abc
import contextlib
import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgespec.drafters.vocabulary import is_padding
from edgespec.errors import ModelFormatError, PromptError
from edgespec.text.chat import ChatTemplate
from quantize.checkpoint_config import read_json

# Stand for a user's words, an answer and the next words while a template is rendered; no text has them.
_WORDS, _ANSWER, _MORE = "\ue000", "\ue001", "\ue002"


@dataclass(frozen=True, slots=True)
class TextSide:
    """
    encode      plain text to ids; spellings of special tokens are text
    decode      ids to text, special tokens left out; what is no UTF-8 is replaced
    end_tokens  ids that end a text or a turn
    special     ids of all special tokens that are no padding
    start       ids before a user's first words; where there are no chats, before any text
    bridge      ids between a user's words and the answer; none where there are no chats
    again       ids between an answer and the user's next words, that which ends the answer among them; none where there
                is no second turn
    """

    encode: abc.Callable[[str], list[int]]
    decode: abc.Callable[[abc.Sequence[int]], str]
    end_tokens: frozenset[int]
    special: frozenset[int]
    start: tuple[int, ...]
    bridge: tuple[int, ...]
    again: tuple[int, ...] = ()


@contextlib.contextmanager
def open_text_side(source: Path, tokens: abc.Sequence[str]) -> abc.Iterator[TextSide]:
    """Of a GGUF, by llama.cpp, or of a checkpoint folder, by the ``tokenizers`` package; usable within the block.

    tokens  the vocabulary's raw texts by id
    Raises what opening a source raises, and MissingDependencyError.
    """
    if source.is_dir():
        yield _of_checkpoint(source, tokens)
        return
    from edgespec.text.tokenizer import Tokenizer
    from edgespec.verifiers.llama_vocabulary import open_vocabulary

    with open_vocabulary(source) as model:
        yield _of_gguf(Tokenizer(model), tokens)


def _of_gguf(tokenizer: Any, tokens: abc.Sequence[str]) -> TextSide:
    template = ChatTemplate(tokenizer.chat_template, bos=tokenizer.bos, eos=tokenizer.eos)
    special = {t for t in range(tokenizer.num_vocab) if not tokenizer.piece(t) and tokenizer.piece(t, special=True)}
    begin = tokenizer.encode_chat("")  # the token that begins a text, where the vocabulary asks for one
    return _text_side(
        lambda text: tokenizer.encode(text, add_special=False, parse_special=False),
        lambda ids: b"".join(map(tokenizer.piece, ids)).decode("utf-8", "replace"),
        lambda text: tokenizer.encode(text, add_special=False, parse_special=True),
        template,
        tokens,
        special=special,
        end_tokens=tokenizer.end_tokens,
        begin=begin,
    )


def _of_checkpoint(folder: Path, tokens: abc.Sequence[str]) -> TextSide:
    from quantize.safetensors_file import short
    from quantize.safetensors_source import open_tokenizer

    tokenizer, files = open_tokenizer(folder), _ChatFiles.read(folder)
    added = tokenizer.get_added_tokens_decoder()

    def encode(text: str) -> list[int]:
        try:
            ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        except Exception as error:  # the package raises nothing more special
            raise ModelFormatError(f"{folder}: its tokenizer.json reads no text: {short(error)}") from error
        return ids

    side = _text_side(
        encode,
        lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=True)),
        encode,
        ChatTemplate(files.template, bos=files.bos, eos=files.eos),
        tokens,
        special={token for token, entry in added.items() if entry.special},
        end_tokens=files.end_tokens | {token for token, text in enumerate(tokens) if text and text == files.eos},
        begin=tokenizer.encode("").ids[:1],
    )
    tokenizer.encode_special_tokens = True  # from now on their spellings are text
    return side


@dataclass(frozen=True, slots=True)
class _ChatFiles:
    """What the small files of a checkpoint say about chats; whatever they leave out is empty."""

    template: str | None
    bos: str
    eos: str
    end_tokens: frozenset[int]

    @classmethod
    def read(cls, folder: Path) -> _ChatFiles:
        """Raises FileAccessError or ModelFormatError for a file that is there and cannot be read."""
        tokenizer, generation = (_optional_json(folder / f"{name}_config.json") for name in ("tokenizer", "generation"))
        ends = [content.get("eos_token_id") for content in (generation, _optional_json(folder / "config.json"))]
        flat = [token for end in ends for token in (end if isinstance(end, list) else [end])]
        bos, eos = (_spelling(tokenizer.get(key)) for key in ("bos_token", "eos_token"))
        return cls(_template(folder, tokenizer), bos, eos, frozenset(token for token in flat if type(token) is int))


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


def _spelling(token: Any) -> str:
    """Of a special token, which is named by its text or described by an object."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else ""


def _template(folder: Path, tokenizer: dict[str, Any]) -> str | None:
    """The newest place first: a file of its own, then a text, then the one called default of a list."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return (folder / "chat_template.jinja").read_text(encoding="utf-8")
    template = tokenizer.get("chat_template")
    if isinstance(template, list):
        named = {str(entry.get("name")): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _text_side(
    encode: abc.Callable[[str], list[int]],
    decode: abc.Callable[[abc.Sequence[int]], str],
    encode_chat: abc.Callable[[str], list[int]],
    template: ChatTemplate,
    tokens: abc.Sequence[str],
    *,
    special: set[int],
    end_tokens: abc.Iterable[int],
    begin: list[int],
) -> TextSide:
    ends = {token for token in end_tokens if 0 <= token < len(tokens)}
    special = {token for token in special if token < len(tokens) and not is_padding(tokens[token])}
    start, bridge, again = map(encode_chat, _chat(template))
    if start[: len(begin)] != begin:
        start = begin + start
    ends |= special.intersection(bridge[:1])  # it ends the user's turn, so the answer's too
    start = start or sorted(ends)[:1] or [0]  # a text begins where another ended
    return TextSide(encode, decode, frozenset(ends), frozenset(special), tuple(start), tuple(bridge), tuple(again))


def _chat(template: ChatTemplate) -> tuple[str, str, str]:
    """What stands before a user's words, between them and the answer, and between that and the user's next words; ""
    without a template."""
    opening, found, between = _rendered(template, _WORDS).partition(_WORDS)
    if not found:
        return "", "", ""
    _, _, after = _rendered(template, _WORDS, _ANSWER, _MORE).partition(_ANSWER)
    again, found, _ = after.partition(_MORE)
    return opening.rstrip(" "), between, again.rstrip(" ") if found else ""  # a word brings its own space


def _rendered(template: ChatTemplate, *contents: str) -> str:
    """A conversation that the user begins; "" where the template refuses it."""
    turns = zip(itertools.cycle(("user", "assistant")), contents, strict=False)
    with contextlib.suppress(PromptError):
        return template.render([{"role": role, "content": content} for role, content in turns])
    return ""
