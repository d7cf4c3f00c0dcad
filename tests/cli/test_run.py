"""``edgespec run`` over fakes: what goes where, flags, exit codes."""

from __future__ import annotations

import io
import json
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgespec.cli import report
from edgespec.cli import run as command
from edgespec.core.costs import Curves, Overlap
from edgespec.core.policy import DEFAULT_POLICY, Fixed, Policy, Threshold
from edgespec.core.sequence import SamplingParams
from edgespec.degraded import Degraded
from edgespec.devices.profile import Profile
from edgespec.errors import EdgespecError, MissingDependencyError
from edgespec.loading import MIN_CONFIDENCE
from edgespec.runtime import Runtime
from edgespec.text.chat import Message
from tests.cli.terminal import run_command
from tests.fakes import END, LETTERS, FakeDrafter, FakeTokenizer, FakeVerifier

JSON_KEYS = {
    "text", "finish_reason", "prompt_tokens", "completion_tokens", "rounds", "drafted", "accepted", "acceptance_rate",
    "tokens_per_round", "tokens_per_s", "ttft_s", "speedup", "draft_s", "hidden_s", "verify_s", "mode", "placement",
    "degraded", "draft", "verifier", "seed",
}  # fmt: skip
CURVES = Curves((1, 8), (0,), ((0.01, 0.02),), (1,), (0.001,), Overlap())


def slow_alphabet(tokens: Any) -> np.ndarray:
    time.sleep(0.001)
    return alphabet(tokens)


def alphabet(tokens: Any) -> np.ndarray:
    """The next letter; after "j" the end."""
    row = np.zeros(32, np.float32)
    row[END if tokens[-1] == LETTERS.index("j") else (tokens[-1] + 1) % 26] = 9.0
    return row


class Stdin(io.TextIOWrapper):
    def __init__(self, data: bytes, terminal: bool = False) -> None:
        super().__init__(io.BytesIO(data), encoding="utf-8")
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal


class Terminal:
    """Runs the command in this process, over fakes, and keeps what it was loaded with."""

    def __init__(self, patch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._patch, self._capsys = patch, capsys
        self.loaded: list[tuple[Any, ...]] = []
        self.options: dict[str, Any] = {}
        self.logits: Any = alphabet
        self.num_ctx = 64
        self.curves: Curves | None = None
        self.degraded = Degraded()

    def load(self, pair: Any, verifier: Any, draft: Any, **options: Any) -> Runtime:
        self.loaded.append((pair, verifier, draft))
        self.options = options
        alone = draft == "none" or options["mode"] == "plain"
        return Runtime(
            FakeVerifier(num_ctx=self.num_ctx, logits=self.logits),
            None if alone else FakeDrafter(logits=self.logits),
            FakeTokenizer(),  # type: ignore[arg-type]
            mode="sequential" if options["mode"] == "auto" else options["mode"],
            policy=options["policy"],
            curves=self.curves,
            degraded=self.degraded,
            placement="one device",
            verifier_name="fake.gguf",
            draft_name="none" if alone else "fake",
        )

    def __call__(self, *arguments: str, stdin: bytes = b"", terminal: bool = False) -> tuple[int, str, str]:
        self._patch.setattr(command, "load", self.load)
        self._patch.setattr(sys, "stdin", Stdin(stdin, terminal))
        return run_command(self._patch, self._capsys, *arguments)


@pytest.fixture
def edgespec(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Terminal:
    return Terminal(monkeypatch, capsys)


def test_stdout_is_the_answer_and_stderr_the_rest(edgespec: Terminal) -> None:
    code, out, err = edgespec("run", "abc", "--temperature", "0", "--draft-length", "5")
    assert (code, out) == (0, "defghij\n")
    assert "8 tokens" in err
    assert "acceptance 70% (7 of 10)" in err
    assert "tokens per round" in err
    assert edgespec.loaded == [(None, None, None)]


def test_json_is_one_object_on_stdout(edgespec: Terminal) -> None:
    edgespec.logits = slow_alphabet
    code, out, err = edgespec("run", "abc", "--temperature", "0", "--json", "--draft-length", "3")
    content = json.loads(out)
    assert (code, err, out.count("\n")) == (0, "", 1)
    assert set(content) == JSON_KEYS
    assert (content["text"], content["finish_reason"], content["mode"]) == ("defghij", "stop", "sequential")
    assert (content["prompt_tokens"], content["completion_tokens"], content["rounds"]) == (3, 8, 2)
    assert content["acceptance_rate"] == content["accepted"] / content["drafted"] == 1.0
    assert (content["draft"], content["verifier"]) == ("fake", "fake.gguf")
    assert (content["placement"], content["degraded"], content["speedup"]) == ("one device", [], None)
    assert content["verify_s"] > 0.0
    assert content["draft_s"] > content["hidden_s"] == 0.0


def test_a_speedup_is_told_where_costs_are_known(edgespec: Terminal) -> None:
    line = ("run", "abc", "--temperature", "0", "--draft-length", "3")
    assert " x plain" not in edgespec(*line)[2]
    edgespec.curves = CURVES
    assert json.loads(edgespec(*line, "--json")[1])["speedup"] > 0
    assert " x plain | sequential, draft fake" in edgespec(*line)[2]


def test_steps_down_are_logged_and_in_json(edgespec: Terminal) -> None:
    edgespec.degraded.add("hybrid", "one device", "the GPU is gone")
    code, out, _ = edgespec("run", "abc", "--temperature", "0", "--json")
    step = {"from": "hybrid", "to": "one device", "reason": "the GPU is gone"}
    assert (code, json.loads(out)["degraded"]) == (0, [step])


def test_overlapped_says_what_was_hidden(edgespec: Terminal) -> None:
    line = ("run", "abc", "--temperature", "0", "--draft-length", "2", "--mode", "overlapped")
    code, out, err = edgespec(*line)
    assert (code, out) == (0, "defghij\n")
    assert "overlapped, draft fake" in err
    content = json.loads(edgespec(*line, "--json")[1])
    assert content["mode"] == "overlapped"
    assert 0.0 <= content["hidden_s"] <= content["draft_s"]


def test_the_prompt_comes_from_stdin_a_file_or_both(edgespec: Terminal, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("abcd", encoding="utf-8")
    assert edgespec("run", "--temperature", "0", stdin=b"ab")[1] == "cdefghij\n"
    assert edgespec("run", "--temperature", "0", "--file", str(file), stdin=b"ignored")[1] == "efghij\n"
    text = command._read_prompt("first", file)
    assert text == "first\n\nabcd"


def test_options_reach_the_sampling(edgespec: Terminal) -> None:
    assert edgespec("run", "abc", "--temperature", "0", "--max-tokens", "2")[1] == "de\n"
    assert edgespec("run", "abc", "--temperature", "0", "--stop", "gh", "--stop", "zz")[1] == "def\n"
    assert edgespec("run", "abc", "--seed", "5", "--rule", "rejection")[2].count("seed 5") == 1


@pytest.fixture
def streamed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, SamplingParams, bool]]:
    """What ``Runtime.stream`` was asked: the prompt, the parameters, whether the prompt is raw."""
    asked: list[tuple[Any, SamplingParams, bool]] = []
    stream = Runtime.stream

    def spy(self: Runtime, prompt: Any, params: SamplingParams, *, raw: bool = False, **options: Any) -> Any:
        asked.append((prompt, params, raw))
        return stream(self, prompt, params, raw=raw, **options)

    monkeypatch.setattr(Runtime, "stream", spy)
    return asked


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("", {}),
        ("--max-tokens 7", {"max_tokens": 7}),
        ("--temperature 0.3", {"temperature": 0.3}),
        ("--top-k 5", {"top_k": 5}),
        ("--top-k 0", {"top_k": 0}),
        ("--top-p 0.5", {"top_p": 0.5}),
        ("--min-p 0.2", {"min_p": 0.2}),
        ("--repeat-penalty 1.3", {"repeat_penalty": 1.3}),
        ("--seed 12", {"seed": 12}),
        ("--seed 0", {"seed": 0}),
        ("--stop x --stop 'y z'", {"stop": ("x", "y z")}),
        ("--rule rejection", {"rule": "rejection"}),
    ],
)
def test_every_sampling_option_reaches_its_parameter_and_no_other(
    edgespec: Terminal, streamed: list[tuple[Any, SamplingParams, bool]], line: str, expected: dict[str, Any]
) -> None:
    assert edgespec("run", "abc", *shlex.split(line))[0] == 0
    assert streamed == [([Message("user", "abc")], SamplingParams(**expected), False)]


def test_the_parts_of_the_prompt_reach_it(
    edgespec: Terminal, streamed: list[tuple[Any, SamplingParams, bool]], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("def", encoding="utf-8")
    edgespec("run", "abc", "--system", "be brief")
    edgespec("run", "abc", "--raw")
    edgespec("run", "--raw", stdin=b" ab ")
    edgespec("run", "-i", "--system", "be brief", stdin=b"abc\n")
    asked = [(prompt, raw) for prompt, _, raw in streamed]
    turns = [Message("system", "be brief"), Message("user", "abc")]
    assert asked == [(turns, False), ("abc", True), (" ab ", True), (turns, False)]


@pytest.mark.parametrize("arguments", [(), ("--help",), ("-h",)])
def test_the_bare_command_and_help_print_the_overview(edgespec: Terminal, arguments: tuple[str, ...]) -> None:
    code, out, err = edgespec(*arguments)
    assert (code, err) == (0, "")
    assert out.startswith("Usage: edgespec")
    assert "Answer one prompt" in out


def test_plain_mode_loads_no_draft(edgespec: Terminal) -> None:
    code, out, _ = edgespec("run", "abc", "--mode", "plain", "--temperature", "0", "--json")
    assert (code, json.loads(out)["mode"], json.loads(out)["draft"]) == (0, "plain", "none")
    assert edgespec("run", "abc", "--draft", "none", "--json", "--temperature", "0")[0] == 0
    assert edgespec.loaded == [(None, None, None), (None, None, "none")]
    assert edgespec.options["mode"] == "auto"


def test_pair_verifier_and_draft_reach_load(edgespec: Terminal) -> None:
    models = ("--pair", "starter", "--verifier", "v.gguf", "--draft", "d")
    edgespec("run", "abc", *models, "--context", "99", "--threads", "3")
    assert edgespec.loaded == [("starter", Path("v.gguf"), "d")]
    assert (edgespec.options["num_ctx"], edgespec.options["num_threads"]) == (99, 3)
    assert edgespec.options["policy"] == DEFAULT_POLICY
    edgespec("run", "abc", "--draft-length", "3", "--min-confidence", "0.5")
    assert edgespec.options["policy"] == Fixed(3, 0.5)
    assert edgespec.options["workers"] == ()
    edgespec("run", "abc", "--rpc", "10.0.0.7:50052", "--rpc", "other:1")
    assert edgespec.options["workers"] == ("10.0.0.7:50052", "other:1")


@pytest.mark.parametrize(
    ("line", "policy"),
    [
        ("", DEFAULT_POLICY),
        ("--policy goodput", DEFAULT_POLICY),
        ("--policy threshold", Threshold(7)),
        ("--policy fixed", Fixed(7, MIN_CONFIDENCE)),
        ("--draft-length 0", Fixed(0, MIN_CONFIDENCE)),
        ("--draft-length 12", Fixed(12, MIN_CONFIDENCE)),
        ("--min-confidence 0", Fixed(7, 0.0)),
        ("--policy fixed --draft-length 2 --min-confidence 1.5", Fixed(2, 1.5)),
    ],
)
def test_options_of_the_draft_length(edgespec: Terminal, line: str, policy: Policy) -> None:
    code, _, err = edgespec("run", "abc", *shlex.split(line))
    assert (code, edgespec.options["policy"]) == (0, policy), err


@pytest.mark.parametrize("mode", ["auto", "plain", "sequential", "overlapped"])
def test_the_mode_reaches_load(edgespec: Terminal, mode: str) -> None:
    assert edgespec("run", "abc", "--mode", mode)[0] == 0
    assert edgespec.options["mode"] == mode


SLOW_BOX = "[speculation]\nmode = 'plain'\npolicy = 'fixed'\nnum_candidates = 4\n"


@pytest.mark.parametrize(
    ("line", "mode", "policy", "draft"),
    [
        ("", "plain", Fixed(4, MIN_CONFIDENCE), None),
        ("--mode sequential", "sequential", Fixed(4, MIN_CONFIDENCE), None),
        ("--draft d", "auto", Fixed(4, MIN_CONFIDENCE), "d"),
        ("--draft d --mode plain", "plain", Fixed(4, MIN_CONFIDENCE), "d"),
        ("--draft-length 2", "plain", Fixed(2, MIN_CONFIDENCE), None),
        ("--draft none", "plain", Fixed(4, MIN_CONFIDENCE), "none"),
        ("--mode sequential --min-confidence 0", "sequential", Fixed(4, 0.0), None),
        ("--mode auto --policy goodput", "auto", DEFAULT_POLICY, None),
        ("--policy threshold", "plain", Threshold(4), None),
    ],
)
def test_a_profile_gives_what_no_option_says(
    edgespec: Terminal, tmp_path: Path, line: str, mode: str, policy: Policy, draft: str | None
) -> None:
    path = tmp_path / "slow.toml"
    path.write_text(SLOW_BOX, encoding="utf-8")
    code, _, err = edgespec("run", "abc", "--profile", str(path), *shlex.split(line))
    assert (code, edgespec.loaded) == (0, [(None, None, draft)]), err
    assert (edgespec.options["mode"], edgespec.options["policy"]) == (mode, policy)
    assert edgespec.options["profile"].name == "slow"
    assert (edgespec.options["num_ctx"], edgespec.options["num_threads"]) == (None, None)


def test_without_a_profile_the_options_are_profiles_own_defaults(edgespec: Terminal) -> None:
    edgespec("run", "abc")
    assert edgespec.options["profile"] == Profile("none")
    assert (edgespec.options["mode"], edgespec.options["policy"]) == ("auto", DEFAULT_POLICY)


def test_check_lossless_reports_on_stderr_and_in_json(edgespec: Terminal) -> None:
    code, out, err = edgespec("run", "abc", "--temperature", "0", "--check-lossless")
    assert (code, out) == (0, "defghij\n")
    assert "lossless: no difference from plain decoding" in err
    code, out, _ = edgespec("run", "abc", "--temperature", "0", "--check-lossless", "--json")
    assert (code, json.loads(out)["divergences"]) == (0, [])


def test_ctrl_c_keeps_what_was_generated(edgespec: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []

    def interrupted(text: str) -> None:
        shown.append(text)
        print(text, end="")
        if len(shown) == 1:
            raise KeyboardInterrupt

    edgespec.num_ctx, edgespec.logits = 100_000, lambda tokens: np.eye(32, dtype=np.float32)[(tokens[-1] + 1) % 26]
    monkeypatch.setattr(report, "show", interrupted)
    arguments = ("run", "abc", "--temperature", "0", "--draft-length", "2", "--max-tokens", "90000")
    code, out, err = edgespec(*arguments)
    assert (code, out) == (130, "".join(shown))
    assert out.startswith("def")
    assert out.endswith("\n")
    assert "cancelled" in err
    shown.clear()
    monkeypatch.setattr(report, "keep", interrupted)
    code, out, _ = edgespec(*arguments, "--json")
    assert code == 130
    content = json.loads("{" + out.split("{", 1)[1])
    assert (content["finish_reason"], content["prompt_tokens"], content["mode"]) == ("cancelled", 3, "sequential")


@pytest.mark.parametrize("made_of_it", [ImportError, MissingDependencyError])
def test_ctrl_c_while_compiled_code_is_imported(
    edgespec: Terminal, monkeypatch: pytest.MonkeyPatch, made_of_it: type[Exception]
) -> None:
    def load(*_: Any, **__: Any) -> None:
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt as error:
            raise made_of_it("initialization failed") from error

    monkeypatch.setattr(edgespec, "load", load)
    assert edgespec("run", "abc") == (130, "", "")


def test_chat_remembers_and_clears(edgespec: Terminal) -> None:
    code, out, _ = edgespec("run", "-i", "--temperature", "0", stdin=b"abc\n\nef\n/clear\nab\n/exit\nnever\n")
    assert (code, out) == (0, "defghij\nghij\ncdefghij\n")


def test_chat_goes_on_after_a_turn_that_does_not_fit(edgespec: Terminal) -> None:
    code, out, err = edgespec("run", "-i", "--temperature", "0", stdin=b"a" * 70 + b"\nabc\n")
    assert (code, out) == (0, "defghij\n")
    assert "70 tokens" in err


def test_chat_begins_with_the_prompt(edgespec: Terminal) -> None:
    assert edgespec("run", "-i", "abc", "--temperature", "0", stdin=b"")[1] == "defghij\n"


BAD = {
    "": 8, "'  '": 8, "a" * 64: 9, "a --temperature -1": 2, "a --temperature nan": 2, "a --temperature inf": 2,
    "a --top-p 0": 2, "a --top-p 1.1": 2, "a --top-k -1": 2, "a --min-p nan": 2, "a --repeat-penalty 0": 2,
    "a --max-tokens 0": 2, "a --seed -3": 2, "a --stop ''": 2, "a --draft-length -1": 2, "a --draft-length x": 2,
    "a --min-confidence -1": 2, "a --min-confidence nan": 2,
    "a --rule best": 2, "a --mode fast": 2, "a --nonsense": 2, "a b": 2, "-i --json": 2, "a --raw --system b": 2,
    "a --mode sequential --draft none": 2, "a --mode overlapped --draft none": 2, "a --policy best": 2,
    "a --policy goodput --draft-length 3": 2, "a --policy threshold --draft-length 3": 2, "a --draft-length 33": 2,
    "a --policy goodput --min-confidence 1": 2, "a --policy threshold --min-confidence 0": 2,
    "--file /does/not/exist": 5, "--file /": 5,
    "a --rule rejection --check-lossless": 2, "a --profile nothing": 14, "a --profile /no/such.toml": 14,
    "a --profile ''": 14,
}  # fmt: skip


@pytest.mark.parametrize("line", BAD)
def test_bad_input_gets_one_line_and_its_exit_code(edgespec: Terminal, line: str) -> None:
    arguments, code = ["run", *(shlex.split(line) or [""])], BAD[line]
    got, out, err = edgespec(*arguments)
    assert (got, out, err.count("\n")) == (code, "", 1)
    assert err.startswith("Error: ")


def test_an_unknown_command(edgespec: Terminal) -> None:
    assert edgespec("walk")[:2] == (2, "")


def test_no_prompt_at_all(edgespec: Terminal) -> None:
    assert edgespec("run", terminal=True)[0] == 8
    assert edgespec("run", stdin=b"")[0] == 8
    code, _, err = edgespec("run", stdin=b"\xff\xfe")
    assert (code, err.count("\n")) == (8, 1)


def test_a_file_without_permission(edgespec: Terminal, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def denied(path: Path) -> bytes:  # root, whom tests often run as, may read everything
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", denied)
    code, _, err = edgespec("run", "--file", str(tmp_path / "secret"))
    assert (code, err.count("\n")) == (5, 1)
    assert "Permission denied" in err


def test_every_error_has_an_exit_code_of_its_own() -> None:
    def below(kind: type[EdgespecError]) -> list[type[EdgespecError]]:
        return [kind, *(found for sub in kind.__subclasses__() for found in below(sub))]

    codes = [kind.exit_code for kind in below(EdgespecError)]
    assert len(codes) == len(set(codes)) == 16


def test_version_and_help(edgespec: Terminal) -> None:
    assert edgespec("--version")[:2] == (0, "edgespec, version 0.1.0\n")
    code, out, _ = edgespec("run", "--help")
    assert code == 0
    assert "--temperature" in out
