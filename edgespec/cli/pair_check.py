"""What ``edgespec models check`` looks at: each check says what it found, or raises what is wrong."""

from __future__ import annotations

import collections.abc as abc
import contextlib
import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgespec.cli.progress import Progress
from edgespec.errors import EdgespecError, ModelFormatError

if TYPE_CHECKING:
    from edgespec.pairs import Pair
    from edgespec.text.tokenizer import Tokenizer

LENGTHS = range(1, 9)  # drafts for which tokens per round are predicted
# Prose, code, numbers, other scripts, an emoji of several code points, and white space of all kinds.
SAMPLES = (
    "The lighthouse keeper's daughter had seen 1,024 ships, and she remembered 17 of them.",
    "def area(radius: float) -> float:\n\treturn 3.14159 * radius**2  # of a circle\n",
    "Grüße aus Köln: « déjà vu », ¿qué tal?, Привет, 你好，世界, こんにちは, مرحبا, नमस्ते",
    "👩\u200d🚀 lifts off 🚀🚀",
    '{"name": "pair", "sizes": [1, 22, 333], "nested": {"empty": null}}\n\n\n  end',
)


@dataclass(frozen=True, slots=True)
class Prediction:
    """How the acceptance is predicted; see edgespec.agreement.compare. ``max_tokens`` 0: not at all."""

    max_tokens: int = 1000
    texts: Path | None = None
    num_threads: int | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """One check: what it found. ``data`` is that for machines; ``error`` what was raised."""

    name: str
    detail: str
    data: dict[str, Any] = field(default_factory=dict)
    error: EdgespecError | None = None

    @property
    def ok(self) -> bool:
        return self.error is None

    def as_dict(self) -> dict[str, Any]:
        return {"name": self.name, "ok": self.ok, "detail": self.detail} | self.data


Found = tuple[str, dict[str, Any]]


def check_pair(pair: Pair, prediction: Prediction, progress: Progress) -> abc.Iterator[Outcome]:
    """Every check whose files are there, in their order; one that fails does not keep the others from being made."""
    verifier = _outcome("verifier file", lambda: _file(pair))
    yield verifier
    if verifier.ok:
        yield _outcome("verifier sha256", lambda: _sha256(pair, progress))
    draft = _outcome("draft model", lambda: _draft(pair, progress))
    yield draft
    if not (verifier.ok and draft.ok):
        return
    gguf, folder = pair.verifier.find(), pair.draft_path
    yield _outcome("tokenizer", lambda: _fingerprints(folder, gguf))
    vocabulary = _outcome("vocabulary", lambda: check_vocabulary(folder, gguf))
    yield vocabulary
    yield _outcome("round trip", lambda: _round_trip(folder, gguf))
    if vocabulary.ok and prediction.max_tokens:
        yield _outcome("acceptance", lambda: _acceptance(folder, gguf, prediction, progress))


def _outcome(name: str, check: abc.Callable[[], Found]) -> Outcome:
    try:
        detail, data = check()
    except EdgespecError as error:
        return Outcome(name, str(error), error=error)
    return Outcome(name, detail, data)


def _file(pair: Pair) -> Found:
    path = pair.verifier.find()
    return f"{path} ({path.stat().st_size / 1e6:.0f} MB)", {"path": str(path)}


def _sha256(pair: Pair, progress: Progress) -> Found:
    pair.verifier.check(pair.verifier.find(), progress)
    return "as the manifest says", {}


def _draft(pair: Pair, progress: Progress) -> Found:
    """Built now where it is built on first use. All its files are compared with the SHA-256 noted when it was built."""
    from edgespec.drafters.onnx_manifest import MANIFEST, DraftManifest
    from edgespec.pairs.pair import check_draft_files

    folder = pair.ensure_draft(progress)
    manifest = DraftManifest.read(folder / MANIFEST)
    check_draft_files(folder, pair.draft_remedy, progress)
    return str(folder), {"path": str(folder), "num_layers": manifest.num_layers}


def check_vocabulary(draft: Path, verifier: Path) -> Found:
    """Every real token of the draft folder against the GGUF's. Raises VocabularyMismatchError."""
    from edgespec.drafters import vocabulary

    ours = _tokens(draft)
    with _open(verifier) as tokenizer:
        vocabulary.check(ours, tokenizer.tokens)
        num_theirs = tokenizer.num_vocab
    num_real = sum(not vocabulary.is_padding(token) for token in ours)
    data = {"num_draft_tokens": len(ours), "num_real_tokens": num_real, "num_verifier_tokens": num_theirs}
    return f"{num_real} tokens are the same; the draft has {len(ours)} ids, the verifier {num_theirs}", data


def _tokens(draft: Path) -> tuple[str, ...]:
    from edgespec.drafters.onnx_manifest import MANIFEST, DraftManifest
    from edgespec.drafters.vocabulary import load_tokens

    return load_tokens(draft / DraftManifest.read(draft / MANIFEST).tokens)


def _fingerprints(draft: Path, verifier: Path) -> Found:
    ours = fingerprint(_tokens(draft))
    with _open(verifier) as tokenizer:
        theirs = fingerprint(tokenizer.tokens)
    relation = "the same" if ours == theirs else "not the same: one knows tokens that the other does not"
    detail = f"draft {ours[:12]}, verifier {theirs[:12]}: {relation}"
    return detail, {"draft_fingerprint": ours, "verifier_fingerprint": theirs}


def fingerprint(tokens: abc.Sequence[str]) -> str:
    """SHA-256 of the token texts by id, as JSON. Padding counts as nothing, so that lists padded differently agree."""
    from edgespec.drafters.vocabulary import is_padding

    real = ["" if is_padding(token) else token.replace("\u2581", " ") for token in tokens]
    while real and not real[-1]:
        real.pop()
    return hashlib.sha256(json.dumps(real).encode()).hexdigest()


def _round_trip(draft: Path, verifier: Path) -> Found:
    """Sample texts to tokens and back, and how many of the tokens the draft can read and propose."""
    from edgespec.drafters.onnx_manifest import MANIFEST, DraftManifest
    from edgespec.drafters.vocabulary import is_padding

    ours, manifest = _tokens(draft), DraftManifest.read(draft / MANIFEST)
    with _open(verifier) as tokenizer:
        used = [token for text in SAMPLES for token in _there_and_back(tokenizer, text)]
    d2t = manifest.read_d2t(draft)
    head = range(len(ours)) if d2t is None else set(d2t.tolist())
    readable = [token for token in used if token < len(ours) and not is_padding(ours[token])]
    proposable = sum(token in head for token in readable)
    detail = f"{len(SAMPLES)} texts are {len(used)} tokens and the same texts again; the draft can read {len(readable)}"
    data = {"num_tokens": len(used), "num_readable": len(readable), "num_proposable": proposable}
    return f"{detail} and propose {proposable} of them", data


def _there_and_back(tokenizer: Tokenizer, text: str) -> list[int]:
    tokens = tokenizer.encode(text, add_special=False, parse_special=False)
    back = b"".join(tokenizer.piece(token) for token in tokens).decode("utf-8", "replace")
    if back.removeprefix(" ") != text:  # SentencePiece puts a space before a text
        raise ModelFormatError(f"the verifier's tokenizer makes {back!r} of {text!r}; get another GGUF of this model")
    return tokens


def _acceptance(draft: Path, verifier: Path, prediction: Prediction, progress: Progress) -> Found:
    """At temperature 0, and what sampling at the temperature that edgespec.agreement looks at makes of it."""
    from edgespec.agreement import compare
    from edgespec.agreement.result import TEMPERATURE

    agreement = compare(
        draft,
        verifier,
        texts=prediction.texts,
        max_tokens=prediction.max_tokens,
        num_threads=prediction.num_threads,
        progress=progress,
    )
    rates = {"0": agreement.total.agreement, f"{TEMPERATURE}": agreement.total.coupled}
    per_round = {
        temperature: {str(length): round(tokens_per_round(rate, length), 2) for length in LENGTHS}
        for temperature, rate in rates.items()
    }
    shown = ", ".join(f"{rate:.0%} at temperature {temperature}" for temperature, rate in rates.items())
    data = {"acceptance_rate": rates, "tokens_per_round": per_round, "agreement": agreement.as_dict()}
    return f"predicted on {agreement.total.num_positions} tokens: {shown}", data


def tokens_per_round(acceptance_rate: float, length: int) -> float:
    """Expected tokens of a round with a draft of ``length``, each accepted with chance a: 1 + a + ... + a^length.

    The 1 is the verifier's own token, which a round always commits (Leviathan et al. 2211.17192, equation 1).
    """
    return sum(acceptance_rate**accepted for accepted in range(length + 1))


@contextlib.contextmanager
def _open(verifier: Path) -> abc.Iterator[Tokenizer]:
    from edgespec.text.tokenizer import Tokenizer
    from edgespec.verifiers.llama_vocabulary import open_vocabulary

    with open_vocabulary(verifier) as model:
        yield Tokenizer(model)
