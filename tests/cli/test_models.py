"""``edgespec models`` as a user runs it: what is printed where, and the exit codes."""

from __future__ import annotations

import collections.abc as abc
import hashlib
import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from edgespec.cli.pair_check import LENGTHS, fingerprint, tokens_per_round
from edgespec.pairs import Pair, known, load_pair
from edgespec.pairs.pair import render
from edgespec.pairs.sources import FileDraft, FileVerifier
from edgespec.paths import pairs_dir
from quantize import build_draft
from tests import tiny
from tests.cli.terminal import run_command
from tests.hub_stub import in_use
from tests.test_pairs_pull import RECIPE
from tests.tiny import TinyConfig, write_gguf


@dataclass
class Terminal:
    """Runs the command in this process."""

    patch: pytest.MonkeyPatch
    capsys: pytest.CaptureFixture[str]

    def run(self, *arguments: str) -> tuple[int, str, str]:
        return run_command(self.patch, self.capsys, "models", *arguments)

    def json(self, *arguments: str) -> Any:
        code, out, err = self.run(*arguments, "--json")
        assert code == 0, err
        return json.loads(out)


@pytest.fixture
def terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Terminal:
    monkeypatch.setenv("EDGESPEC_DATA_DIR", str(tmp_path / "data"))
    return Terminal(monkeypatch, capsys)


def make_pair(folder: Path, verifier: TinyConfig, draft: TinyConfig) -> Path:
    """A pair folder, of which the draft's own GGUF is no part."""
    folder.mkdir(parents=True)
    gguf = write_gguf(folder / "verifier.gguf", verifier)
    small = build_draft(write_gguf(folder.parent / "draft.gguf", draft), folder / "draft", bits=32)
    content = gguf.read_bytes()
    pair = Pair(
        "mine",
        "a pair of one's own",
        "MIT",
        FileVerifier(gguf.name, len(content), hashlib.sha256(content).hexdigest()),
        FileDraft("draft", hashlib.sha256((small / "draft.toml").read_bytes()).hexdigest()),
    )
    (folder / "pair.toml").write_text(render(pair), encoding="utf-8")
    return folder


@pytest.fixture
def mine(tmp_path: Path, terminal: Terminal) -> Path:
    """A pair among the user's own, with more padding on the verifier's side."""
    return make_pair(tmp_path / "data" / "pairs" / "mine", TinyConfig(num_vocab=352), TinyConfig(noise=0.2))


def test_help_names_the_commands(terminal: Terminal) -> None:
    code, out, _ = terminal.run()
    assert code == 0
    for name in ("list", "show", "check", "pull"):
        assert f"\n  {name} " in out
        assert "..." not in terminal.run(name, "--help")[1].split("Options:")[0]
    assert "..." not in out.split("Commands:")[1]


# list


def test_the_list_says_of_every_pair_what_is_missing(terminal: Terminal, mine: Path) -> None:
    (pairs_dir() / "broken").mkdir()
    (pairs_dir() / "broken" / "pair.toml").write_text("format = 1\nname = 3\n", encoding="utf-8")
    rows = {row["name"]: row for row in terminal.json("list")}
    assert list(rows) == sorted(rows)
    assert {"smollm2-1.7b", "qwen2.5-7b", "qwen3-8b", "llama-3.2-3b", "starter", "mine", "broken"} == set(rows)
    assert {key: rows["mine"][key] for key in ("where", "ready", "state", "license")} == {
        "where": "yours", "ready": True, "state": "ready", "license": "MIT"
    }  # fmt: skip
    assert (rows["qwen3-8b"]["where"], rows["qwen3-8b"]["ready"]) == ("shipped", False)
    assert rows["qwen3-8b"]["state"] == "to be pulled"
    assert "[verifier] is missing" in rows["broken"]["state"]
    (mine / "verifier.gguf").unlink()
    code, out, err = terminal.run("list")
    assert code == 0
    assert str(pairs_dir()) in err
    assert f"mine          yours      the pair's verifier {mine / 'verifier.gguf'} is missing" in out
    assert "Llama 3.2 Community License" in out


# show


def test_show_prints_the_manifest_and_whether_it_was_ever_pulled(terminal: Terminal) -> None:
    content = terminal.json("show", "qwen2.5-7b")
    assert content["verifier"]["hub"] == "Qwen/Qwen2.5-7B-Instruct-GGUF"
    assert content["pulled"] == "never"
    assert content["where"] == "shipped"
    code, out, _ = terminal.run("show", "qwen2.5-7b")
    assert code == 0
    assert "verifier hub         Qwen/Qwen2.5-7B-Instruct-GGUF\n" in out
    assert "pulled               never: nobody has seen this manifest work yet\n" in out
    assert "profile " not in out


@pytest.mark.parametrize("command", ["show", "check", "pull"])
def test_an_unknown_pair_is_one_line_and_an_exit_code(terminal: Terminal, command: str) -> None:
    code, out, err = terminal.run(command, "qwen3-8c")
    assert (code, out) == (6, "")
    assert err.startswith("Error: unknown pair 'qwen3-8c'")
    assert "did you mean qwen3-8b?" in err
    assert err.count("\n") == 1


# pull


@pytest.fixture
def hub(terminal: Terminal, tmp_path: Path) -> abc.Iterator[Any]:
    terminal.patch.setattr(known, "data_dir", lambda name: tmp_path / name)
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "small.toml").write_text(RECIPE, encoding="utf-8")
    big = write_gguf(tmp_path / "big.gguf", TinyConfig(num_vocab=352)).read_bytes()
    small = write_gguf(tmp_path / "small.gguf", TinyConfig(noise=0.2)).read_bytes()
    with in_use(terminal.patch, tmp_path / "home") as stub:
        stub.add("owner/big-GGUF", {"big.gguf": big})
        stub.add("owner/draft-GGUF", {"f16.gguf": small})
        yield stub


def test_pull_then_list_then_check(terminal: Terminal, hub: Any) -> None:
    code, out, err = terminal.run("pull", "small")
    assert code == 0, err
    assert "edgespec run --pair small" in out
    assert "small: downloading big.gguf" in err
    (row,) = terminal.json("list")
    assert (row["where"], row["ready"]) == ("installed", True)
    num_requests = len(hub.requests)
    again = terminal.json("pull", "small")
    assert (again["was_there"], len(hub.requests)) == (True, num_requests)
    assert terminal.json("pull", "small", "--force")["was_there"] is False
    assert len(hub.requests) > num_requests
    code, out, err = terminal.run("check", "small", "--max-tokens", "0")
    assert (code, "FAILED" in out) == (0, False)


def test_a_pulled_pair_that_is_damaged_says_how_to_get_it_again(terminal: Terminal, hub: Any) -> None:
    terminal.run("pull", "small")
    folder = pairs_dir() / "small"
    (folder / "big.gguf").unlink()
    code, _, err = terminal.run("pull", "small")
    assert (code, "--force" in err) == (5, True)
    (row,) = terminal.json("list")
    assert "edgespec models pull small --force" in row["state"]
    (folder / "pair.toml").unlink()
    code, _, err = terminal.run("pull", "small")
    assert (code, "move it away" in err) == (5, True)


def test_a_download_that_fails_is_one_line_and_an_exit_code(terminal: Terminal, hub: Any) -> None:
    hub.repositories["owner/big-GGUF"].gated = 401
    code, out, err = terminal.run("pull", "small", "--json")
    assert (code, out) == (16, "")
    assert "hf auth login" in err.splitlines()[-1]


# check


def test_a_pair_that_is_right_passes_every_check(terminal: Terminal, mine: Path) -> None:
    content = terminal.json("check", "mine", "--max-tokens", "40", "--threads", "1")
    assert content["ok"] is True
    checks = {check["name"]: check for check in content["checks"]}
    assert list(checks) == [
        "verifier file", "verifier sha256", "draft model", "tokenizer", "vocabulary", "round trip", "acceptance"
    ]  # fmt: skip
    assert checks["tokenizer"]["draft_fingerprint"] == checks["tokenizer"]["verifier_fingerprint"]
    assert checks["vocabulary"]["num_real_tokens"] == 274
    assert checks["round trip"]["num_readable"] == checks["round trip"]["num_tokens"] > 100
    acceptance = checks["acceptance"]
    rate = acceptance["acceptance_rate"]["0"]
    assert acceptance["agreement"]["agreement"] == rate
    assert acceptance["agreement"]["num_positions"] < 80
    assert acceptance["tokens_per_round"]["0"]["2"] == round(1 + rate + rate**2, 2)
    assert list(acceptance["tokens_per_round"]) == ["0", "0.8"]


def test_the_checks_are_lines_for_people(terminal: Terminal, mine: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("the cat and the hat in the sea", encoding="utf-8")
    code, out, err = terminal.run("check", str(mine), "--text", str(tmp_path / "text.txt"))
    assert code == 0
    assert [line[:7] for line in out.splitlines()] == ["ok     "] * 7 + [" " * 7] * 2
    assert "tokens per round by draft length, at temperature 0:  1: 1." in out
    assert "mine: comparing" in err


def test_a_text_that_cannot_be_read_is_a_check_that_fails(terminal: Terminal, mine: Path, tmp_path: Path) -> None:
    code, out, _ = terminal.run("check", "mine", "--text", str(tmp_path / "none.txt"))
    assert code != 0
    assert "FAILED acceptance: " in out


def test_every_check_that_fails_is_a_line(terminal: Terminal, mine: Path) -> None:
    """And those that can still be made are made."""
    gguf = mine / "verifier.gguf"
    gguf.write_bytes(gguf.read_bytes()[:-1] + b"!")
    (mine / "draft" / "tokens.json").write_text('["a", "b"]', encoding="utf-8")
    code, out, err = terminal.run("check", "mine")
    assert code == 4
    failed = [line for line in out.splitlines() if line.startswith("FAILED")]
    assert [line.split(":")[0] for line in failed] == ["FAILED verifier sha256", "FAILED draft model"]
    assert err.splitlines()[-1] == "Error: mine: 2 of 3 checks failed: verifier sha256, draft model"


@pytest.mark.parametrize("name", ["model.onnx", "model.onnx.data", "tokens.json"])
@pytest.mark.parametrize("damage", ["a bit", "half", "another's", "missing"])
def test_a_damaged_draft_is_found(terminal: Terminal, mine: Path, tmp_path: Path, name: str, damage: str) -> None:
    """Without its rows being looked at."""
    path, config = mine / "draft" / name, TinyConfig(num_vocab=321, num_layers=3)
    content = path.read_bytes()
    path.unlink()
    if damage == "another's":
        shutil.copy(build_draft(write_gguf(tmp_path / "o.gguf", config), tmp_path / "other") / name, path)
    elif damage != "missing":
        path.write_bytes(content[: len(content) // 2] if damage == "half" else content[:-1] + bytes([content[-1] ^ 1]))
    code, out, err = terminal.run("check", "mine", "--max-tokens", "0")
    assert (code, "FAILED draft model: " in out) == (3 if damage == "missing" else 4, True)
    assert str(path) in out
    assert err.splitlines()[-1] == "Error: mine: 1 of 3 checks failed: draft model"


def test_a_missing_file_does_not_hide_the_other_side(terminal: Terminal, mine: Path) -> None:
    (mine / "verifier.gguf").unlink()
    code, out, _ = terminal.run("check", "mine", "--json")
    content = json.loads(out)
    assert (code, content["ok"]) == (3, False)
    assert [(check["name"], check["ok"]) for check in content["checks"]] == [
        ("verifier file", False),
        ("draft model", True),
    ]


def test_another_vocabulary_is_found_token_by_token(terminal: Terminal, tmp_path: Path) -> None:
    folder = make_pair(tmp_path / "odd", TinyConfig(), TinyConfig())
    with terminal.patch.context() as patch:
        patch.setattr(tiny, "MERGES", ("a b", *tiny.MERGES[1:]))
        gguf = write_gguf(folder / "verifier.gguf", TinyConfig()).read_bytes()
    pair = load_pair(str(folder))
    assert isinstance(pair.verifier, FileVerifier)
    verifier = replace(pair.verifier, size_bytes=len(gguf), sha256=hashlib.sha256(gguf).hexdigest())
    (folder / "pair.toml").write_text(render(replace(pair, verifier=verifier)), encoding="utf-8")
    code, out, _ = terminal.run("check", str(folder))
    assert code == 7
    assert "FAILED vocabulary: the draft model has another vocabulary than the verifier: token 259" in out
    assert "ok     tokenizer" in out
    assert "not the same" in out


@pytest.mark.parametrize("rate", [0.0, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("length", LENGTHS)
def test_tokens_per_round_is_the_geometric_sum(rate: float, length: int) -> None:
    closed = length + 1 if rate == 1 else (1 - rate ** (length + 1)) / (1 - rate)
    assert tokens_per_round(rate, length) == pytest.approx(closed)


def test_a_fingerprint_sees_real_tokens_only() -> None:
    assert fingerprint(["a", "[PAD1]", "b"]) == fingerprint(["a", "", "b", "<unused7>"])
    assert fingerprint(["a", "b"]) != fingerprint(["b", "a"])
    assert fingerprint(["▁a"]) == fingerprint([" a"])
    assert fingerprint(["\udce9"]) != fingerprint(["\udce8"])
    assert len(bytes.fromhex(fingerprint([]))) == 32


@pytest.mark.model
def test_the_starter_pair_is_right(terminal: Terminal, starter_draft: Path) -> None:
    content = terminal.json("check", "starter", "--max-tokens", "0")
    assert content["ok"] is True
    (vocabulary,) = (check for check in content["checks"] if check["name"] == "vocabulary")
    assert vocabulary["num_real_tokens"] > 49_000
