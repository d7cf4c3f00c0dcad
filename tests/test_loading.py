"""``load`` over tiny real models: llama.cpp and ONNX Runtime, wired as for a user."""

from __future__ import annotations

import collections.abc as abc
import itertools
import shutil
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import llama_cpp
import pytest

from edgespec import opening
from edgespec.cli import main as entry
from edgespec.core.policy import Fixed
from edgespec.core.sequence import SamplingParams
from edgespec.devices import probe
from edgespec.drafters.onnx import OnnxDrafter
from edgespec.errors import (
    EdgespecError,
    FileAccessError,
    ModelFormatError,
    ModelNotFoundError,
    ParameterError,
    UnknownPairError,
    VocabularyMismatchError,
)
from edgespec.loading import MIN_CONFIDENCE, load
from edgespec.runtime import Runtime
from edgespec.verifiers.llama import LlamaVerifier
from quantize import build_draft
from tests.tiny import END_OF_TEXT, IM_END, TinyConfig, write_gguf, write_usual_onnx

PROMPTS = ("the cat and the hat", "in the sea", "andering " * 5)
NEVER_ENDING = ((END_OF_TEXT, -100.0), (IM_END, -100.0))
NUM_TOKENS = 64
SURE = Fixed(7, MIN_CONFIDENCE)


def params(temperature: float, max_tokens: int | None = NUM_TOKENS, seed: int = 3) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed, logit_bias=NEVER_ENDING)


def open_tiny(verifier: Path, draft: Path | str | None = None, **options: Any) -> Runtime:
    """Nothing of it depends on what the box is busy with: one thread a side, and a mode and a policy that need no
    measurement."""
    usual: dict[str, Any] = {"num_threads": 1, "mode": "sequential", "policy": SURE}
    return load(verifier=verifier, draft=draft, **usual | options)


def llama_verifier(runtime: Runtime) -> Any:
    """The one in use."""
    fallback: Any = runtime._verifier
    return fallback.verifier


def onnx_drafter(runtime: Runtime) -> Any:
    """The draft model; lookup is combined with it."""
    thread: Any = runtime._drafter
    return thread._drafter._model


@pytest.fixture(scope="module")
def eight_bits(tiny_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_draft(tiny_gguf, tmp_path_factory.mktemp("eight") / "draft", bits=8)


@pytest.fixture(params=["own_folder", "eight_bits", "usual_folder"])
def draft(request: pytest.FixtureRequest) -> Path:
    """The verifier itself as a draft model: whole, quantized, and as exporters publish it."""
    folder: Path = request.getfixturevalue(request.param)
    return folder


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_sequential_gives_plains_tokens(tiny_gguf: Path, draft: Path, temperature: float) -> None:
    with open_tiny(tiny_gguf, draft) as runtime:
        assert (runtime.mode, runtime.verifier_name, runtime.draft_name) == ("sequential", "tiny.gguf", draft.name)
        for prompt in PROMPTS:
            plain = runtime.generate(prompt, params(temperature), mode="plain")
            sequential = runtime.generate(
                prompt, params(temperature), policy=Fixed(5)
            )  # a random model is full of ties
            assert sequential.tokens == plain.tokens
            assert sequential.text == plain.text
            assert len(sequential.tokens) == NUM_TOKENS
            assert sequential.stats.accepted > NUM_TOKENS / 2
            assert sequential.stats.rounds < NUM_TOKENS / 2 + 1


@pytest.mark.parametrize("margin", [0.0, MIN_CONFIDENCE])
@pytest.mark.parametrize("draft", ["own_folder", "usual_folder"], indirect=True)
def test_a_draft_that_is_the_verifier_is_accepted(tiny_gguf: Path, draft: Path, margin: float) -> None:
    with open_tiny(tiny_gguf, draft, policy=Fixed(7, margin)) as runtime:
        stats = [runtime.generate(prompt, params(0.0)).stats for prompt in PROMPTS]
    drafted, accepted = sum(one.drafted for one in stats), sum(one.accepted for one in stats)
    assert drafted > len(PROMPTS) * NUM_TOKENS / 2
    assert accepted / drafted > 0.95


def test_another_model_is_a_bad_draft_and_changes_nothing(tiny_gguf: Path, tmp_path: Path) -> None:
    bad = build_draft(write_gguf(tmp_path / "other.gguf", TinyConfig(seed=9)), tmp_path / "draft", bits=32)
    with open_tiny(tiny_gguf, bad) as runtime:
        plain = runtime.generate(PROMPTS[0], params(0.8), mode="plain")
        sequential = runtime.generate(PROMPTS[0], params(0.8))
    assert sequential.tokens == plain.tokens
    assert sequential.stats.drafted > NUM_TOKENS
    assert sequential.stats.acceptance_rate < 0.5


@pytest.mark.parametrize("kind", ["own", "usual"])
def test_a_draft_with_a_shorter_context_helps_as_far_as_it_reaches(tiny_gguf: Path, tmp_path: Path, kind: str) -> None:
    short, reach = TinyConfig(num_ctx=64), 64
    if kind == "own":
        draft = build_draft(write_gguf(tmp_path / "short.gguf", short), tmp_path / "draft", bits=32)
    else:
        draft = write_usual_onnx(tmp_path / "draft", short)
    with open_tiny(tiny_gguf, draft) as runtime:
        plain = runtime.generate(PROMPTS[0], params(0.0, max_tokens=None), mode="plain")
        chunks = list(runtime.stream(PROMPTS[0], params(0.0, max_tokens=None)))
    assert tuple(token for chunk in chunks for token in chunk.tokens) == plain.tokens
    last = chunks[-1].stats
    assert chunks[-1].finish_reason == plain.finish_reason == "length"
    assert last.prompt_tokens + last.completion_tokens == 256
    drafted = [after.stats.drafted - before.stats.drafted for before, after in itertools.pairwise(chunks)]
    reached = [chunk.stats.prompt_tokens + chunk.stats.completion_tokens >= reach for chunk in chunks[:-1]]
    assert sum(drafted) > 10
    assert not any(num for num, beyond in zip(drafted, reached, strict=True) if beyond)


def test_a_verifier_alone_is_helped_by_lookup(tiny_gguf: Path) -> None:
    with open_tiny(tiny_gguf) as runtime:
        assert (runtime.draft_name, runtime.mode) == ("lookup", "sequential")
        plain = runtime.generate("abcabcabcabc", params(0.0), raw=True, mode="plain")
        found = runtime.generate("abcabcabcabc", params(0.0), raw=True)
    assert found.stats.drafted > 0
    assert found.tokens == plain.tokens


def test_without_a_draft_the_mode_is_plain(tiny_gguf: Path) -> None:
    with open_tiny(tiny_gguf, "none", mode="auto") as runtime:
        assert (runtime.draft_name, runtime.mode) == ("none", "plain")
        assert runtime.generate(PROMPTS[0], params(0.0)).stats.drafted == 0


def test_the_context_asked_for_holds_for_both(tiny_gguf: Path, own_folder: Path) -> None:
    with open_tiny(tiny_gguf, own_folder, num_ctx=80) as runtime:
        assert runtime.num_ctx == 80
        result = runtime.generate("the cat", params(0.0, max_tokens=None))
    assert result.stats.prompt_tokens + result.stats.completion_tokens == 80
    assert result.finish_reason == "length"


def test_several_threads_share_one_runtime(tiny_gguf: Path, own_folder: Path) -> None:
    asked = [(prompt, params(0.8, seed=seed, max_tokens=24)) for seed in range(3) for prompt in PROMPTS]
    with open_tiny(tiny_gguf, own_folder) as runtime, ThreadPoolExecutor(4) as pool:
        alone = [runtime.generate(*one, mode="plain").tokens for one in asked]
        together = [future.result().tokens for future in [pool.submit(runtime.generate, *one) for one in asked]]
    assert together == alone
    assert len(set(alone)) == len(asked)


@pytest.mark.parametrize(("asked", "got"), [(None, 3), (1, 1)])
def test_the_usable_cpus_reach_both_sides(
    tiny_gguf: Path, own_folder: Path, monkeypatch: pytest.MonkeyPatch, asked: int | None, got: int
) -> None:
    monkeypatch.setattr(opening, "usable_cpus", lambda: 3)
    with open_tiny(tiny_gguf, own_folder, num_threads=asked) as runtime:
        verifier, drafter = llama_verifier(runtime), onnx_drafter(runtime)
        assert llama_cpp.llama_n_threads(verifier._context) == got
        assert llama_cpp.llama_n_threads_batch(verifier._context) == got
        assert drafter._model._session.get_session_options().intra_op_num_threads == got


def test_more_threads_than_cpus_are_not_started_and_that_is_told(
    tiny_gguf: Path, own_folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(opening, "usable_cpus", lambda: 1)
    monkeypatch.setattr(probe, "usable_cpus", lambda *_: 1)
    with open_tiny(tiny_gguf, own_folder, num_threads=500) as runtime:
        assert llama_cpp.llama_n_threads(llama_verifier(runtime)._context) == 1
    assert [record.getMessage() for record in caplog.records if "500 threads" in record.getMessage()] == [
        "500 threads asked for, but only 1 CPUs are usable: 1 are started"
    ]


# What cannot be loaded


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was opened and closed, in order."""
    notes: list[str] = []

    def note(kind: type[Any], name: str, text: str) -> None:
        original = getattr(kind, name)

        def noted(self: Any, *arguments: Any) -> None:
            notes.append(text)
            original(self, *arguments)

        monkeypatch.setattr(kind, name, noted)

    note(LlamaVerifier, "_make_context", "verifier opened")
    note(LlamaVerifier, "close", "verifier closed")
    note(OnnxDrafter, "__init__", "drafter opened")
    note(OnnxDrafter, "close", "drafter closed")
    return notes


def assert_no_owner_is_left() -> None:
    for thread in threading.enumerate():
        if thread.name.startswith("edgespec-"):
            thread.join(10)
            assert not thread.is_alive()


def refused(error: type[EdgespecError], verifier: Path, draft: Path | str) -> str:
    with pytest.raises(error) as caught:
        open_tiny(verifier, draft)
    assert "\n" not in str(caught.value)
    assert_no_owner_is_left()
    return str(caught.value)


@pytest.fixture
def foreign(usual_folder: Path, tmp_path: Path) -> Path:
    """A draft model that has one other token than the verifier."""
    folder = tmp_path / "foreign"
    shutil.copytree(usual_folder, folder)
    text = (folder / "tokenizer.json").read_text(encoding="utf-8")
    (folder / "tokenizer.json").write_text(text.replace('"Ġthe":', '"Ġtea":'), encoding="utf-8")
    return folder


def test_a_draft_of_another_vocabulary_is_refused_and_all_is_closed(
    tiny_gguf: Path, foreign: Path, events: list[str]
) -> None:
    assert "'Ġtea'" in refused(VocabularyMismatchError, tiny_gguf, foreign)
    assert events[:2] == ["verifier opened", "drafter opened"]
    assert set(events[2:]) == {"drafter closed", "verifier closed"}


def test_the_command_line_says_so_with_the_code_of_its_own(
    tiny_gguf: Path, foreign: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    profile = tmp_path / "cpu.toml"
    profile.write_text("[verifier]\ngpu_layers = 0\n")
    models = ["--verifier", str(tiny_gguf), "--draft", str(foreign)]
    monkeypatch.setattr(sys, "argv", ["edgespec", "run", "a", *models, "--threads", "1", "--profile", str(profile)])
    with pytest.raises(SystemExit) as ended:
        entry.main()
    out, err = capsys.readouterr()
    assert (ended.value.code, out, err.count("\n")) == (7, "", 1)
    assert err.startswith("Error: ")


def remove(path: Path) -> None:
    path.unlink()


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 3])


@pytest.mark.parametrize(
    ("name", "spoil", "error"),
    [
        ("model.onnx", remove, ModelNotFoundError),
        ("model.onnx", cut, ModelFormatError),
        ("model.onnx.data", cut, ModelFormatError),
        ("draft.toml", cut, ModelFormatError),
        ("tokens.json", cut, ModelFormatError),
        ("tokens.json", remove, ModelNotFoundError),
    ],
)
def test_a_spoilt_draft_is_refused_and_the_verifier_closed(
    tiny_gguf: Path,
    own_folder: Path,
    tmp_path: Path,
    events: list[str],
    name: str,
    spoil: abc.Callable[[Path], None],
    error: type[EdgespecError],
) -> None:
    folder = tmp_path / "draft"
    shutil.copytree(own_folder, folder)
    spoil(folder / name)
    refused(error, tiny_gguf, folder)
    assert "verifier closed" in events
    assert ("drafter opened" in events) == ("drafter closed" in events)


def test_what_is_not_there_or_no_model_is_refused(tiny_gguf: Path, own_folder: Path, tmp_path: Path) -> None:
    refused(ModelNotFoundError, tiny_gguf, tmp_path / "missing")
    refused(ModelNotFoundError, tiny_gguf, tmp_path)
    refused(ModelNotFoundError, tiny_gguf, "look-up")
    refused(ModelNotFoundError, tmp_path / "missing.gguf", own_folder)
    refused(FileAccessError, tmp_path, own_folder)
    (tmp_path / "text.gguf").write_text("no model", encoding="utf-8")
    refused(ModelFormatError, tmp_path / "text.gguf", own_folder)
    with open_tiny(tiny_gguf, own_folder) as runtime:
        assert runtime.generate("the", params(0.0, max_tokens=3)).stats.completion_tokens == 3


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"num_ctx": 0}, ParameterError),
        ({"num_threads": 0}, ParameterError),
        ({"num_threads": -1}, ParameterError),
        ({"num_threads": 1025}, ParameterError),
        ({"num_slots": 0}, ParameterError),
        ({"num_slots": 257}, ParameterError),
        ({"workers": ["nonsense"]}, ParameterError),
        ({"mode": "fast"}, ParameterError),
        ({"pair": "unheard-of"}, UnknownPairError),
    ],
)
def test_values_outside_their_range_are_refused(
    tiny_gguf: Path, own_folder: Path, options: dict[str, Any], error: type[EdgespecError]
) -> None:
    with pytest.raises(error):
        load(**{"verifier": tiny_gguf, "draft": own_folder, "num_threads": 1, **options})
    assert_no_owner_is_left()
