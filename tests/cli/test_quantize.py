"""``edgespec quantize`` on real tiny models: what it makes and prints."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from edgespec.cli import quantize as command
from edgespec.devices.profile import load_profile
from edgespec.loading import choose_profile
from edgespec.pairs import load_pair
from tests.cli.terminal import Command, names, only_error


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    path = tmp_path / "mine.toml"
    path.write_text("[draft]\nbits = 4\nblock_size = 64\nhead_vocab = 80\n[verifier]\ngguf_type = 'Q5_K_M'\n")
    return path


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("the king and the ring\n" * 8000, encoding="utf-8")
    return path


# -------------------------------------------------------------------------------------------------------------- drafts


def test_a_draft(quantize: Command, tiny_gguf: Path, tmp_path: Path) -> None:
    out = tmp_path / "my draft"
    code, printed, err = quantize("draft", tiny_gguf, "--out", out)
    assert code == 0
    assert "8 bits" in printed
    assert str(out) in printed
    assert f"--draft '{out}'" in err
    manifest = (out / "draft.toml").read_text()
    assert "bits = 8\nblock_size = 32\n" in manifest
    assert "d2t" not in manifest
    assert names(tmp_path) == {"my draft"}


def test_options_win_over_the_profile(
    quantize: Command, tiny_gguf: Path, profile: Path, corpus: Path, tmp_path: Path
) -> None:
    common = ("draft", tiny_gguf, "--profile", profile, "--corpus", corpus, "--json")
    code, printed, _ = quantize(*common, "--out", tmp_path / "profiled")
    content = json.loads(printed)
    assert code == 0
    assert (content["bits"], content["block_size"], content["head_vocab"], content["layers"]) == (4, 64, 80, None)
    assert 0.9 < content["coverage"] <= 1
    options = ("--bits", "8", "--block-size", "16", "--head-vocab", "0", "--layers", "1")
    _, printed, _ = quantize(*common, *options, "--out", tmp_path / "own")
    content = json.loads(printed)
    assert (content["bits"], content["block_size"], content["head_vocab"]) == (8, 16, None)
    assert content["layers"] == [1]
    manifest = (tmp_path / "own" / "draft.toml").read_text()
    assert "num_layers = 1\n" in manifest
    assert "block_size = 16\n" in manifest


def test_a_trimmed_head_says_what_it_covers(quantize: Command, tiny_gguf: Path, corpus: Path, tmp_path: Path) -> None:
    arguments = ("draft", tiny_gguf, "--out", tmp_path / "d", "--head-vocab", "64", "--corpus", corpus)
    code, printed, _ = quantize(*arguments)
    assert code == 0
    assert "head of 64 ids: they are " in printed
    assert "%" in printed
    assert "Error" in quantize(*arguments)[2]  # before anything is counted
    assert "counting" not in quantize(*arguments)[2]
    assert quantize(*arguments, "--force")[0] == 0


def test_a_corpus_without_a_head_to_choose(
    quantize: Command, big: Path, tiny_gguf: Path, corpus: Path, tmp_path: Path
) -> None:
    common = ("--out", tmp_path / "d", "--corpus", corpus)
    assert "head_vocab" in only_error(quantize("draft", tiny_gguf, *common))
    (tmp_path / "whole.toml").write_text("[draft]\nhead_vocab = 0\n")
    pair = ("pair", "--verifier", big, "--draft", tiny_gguf, "--profile", tmp_path / "whole.toml")
    assert "head_vocab" in only_error(quantize(*pair, *common))
    assert not (tmp_path / "d").exists()


@pytest.mark.parametrize(
    ("text", "expected"),
    [("0", (0,)), ("0,1,28,29", (0, 1, 28, 29)), ("0-3", (0, 1, 2, 3)), ("5, 0-1", (5, 0, 1))],
)
def test_layers(text: str, expected: tuple[int, ...]) -> None:
    assert command._layers(None, None, text) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "text", ["", "a", "1,", "3-1", "-1", "1-", "0-99999999999", f"0-{1 << 70}", "1.5", "0x1", "1--2"]
)
def test_layers_that_are_none(quantize: Command, text: str, tiny_gguf: Path, tmp_path: Path) -> None:
    result = quantize("draft", tiny_gguf, "--out", tmp_path / "d", "--layers", text)
    assert result[0] == 2
    assert "0,1,26-29" in only_error(result)


# ----------------------------------------------------------------------------------------------------------- verifiers


def test_a_verifier(quantize: Command, big: Path, profile: Path, tmp_path: Path) -> None:
    code, printed, err = quantize("verifier", big, "--out", tmp_path / "q.gguf", "--type", "q4_k_m")
    assert code == 0
    assert "Q4_K_M" in printed
    assert f"--verifier {tmp_path / 'q.gguf'}" in err
    size = (tmp_path / "q.gguf").stat().st_size
    assert size < big.stat().st_size / 2
    code, printed, _ = quantize("verifier", big, "--out", tmp_path / "p.gguf", "--profile", profile, "--json")
    assert json.loads(printed)["type"] == "Q5_K_M"
    assert json.loads(printed)["size_bytes"] == (tmp_path / "p.gguf").stat().st_size > size


def test_a_verifier_of_no_type_is_a_usage_error(quantize: Command, big: Path, tmp_path: Path) -> None:
    result = quantize("verifier", big, "--out", tmp_path / "q.gguf")
    assert result[0] == 2
    assert "--type" in only_error(result)
    assert only_error(quantize("verifier", big, "--out", tmp_path / "q.gguf", "--type", "Q4")).count("Q4_K_M")
    assert "got ''; allowed" in only_error(quantize("verifier", big, "--out", tmp_path / "q.gguf", "--type", ""))


def test_a_quantized_verifier_needs_permission(quantize: Command, big: Path, tmp_path: Path) -> None:
    assert quantize("verifier", big, "--out", tmp_path / "a.gguf", "--type", "Q8_0")[0] == 0
    again = ("verifier", tmp_path / "a.gguf", "--out", tmp_path / "b.gguf", "--type", "Q4_K_M")
    assert "quantized already" in only_error(quantize(*again))
    assert quantize(*again, "--requantize")[0] == 0


# --------------------------------------------------------------------------------------------------------------- pairs


def test_a_pair(quantize: Command, big: Path, tiny_gguf: Path, profile: Path, corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "pair"
    arguments = ("pair", "--verifier", big, "--draft", tiny_gguf, "--profile", profile, "--corpus", corpus)
    code, printed, err = quantize(*arguments, "--out", out)
    assert code == 0, err
    for part in ("verifier weights Q5_K_M", "draft KV cache", "main memory", "fits", "head of 80 ids"):
        assert part in printed
    assert f"edgespec run --pair {out}\n" in err
    assert choose_profile(None, str(out)) == load_profile(str(profile))  # found though nobody knows it by its name
    assert load_pair(str(out)).profile == "mine"
    code, printed, _ = quantize(*arguments, "--out", out, "--force", "--json", "--type", "Q8_0", "--head-vocab", "0")
    content = json.loads(printed)
    assert (code, printed.count("\n")) == (0, 1)
    assert (content["path"], content["profile"], content["verifier"]["type"]) == (str(out), "mine", "Q8_0")
    assert "coverage" not in content["draft"]
    assert content["memory"]["fits"]
    assert sum(line["bytes"] for line in content["memory"]["lines"]) == content["memory"]["main_bytes"]


def test_a_pair_that_does_not_fit_shows_its_plan(quantize: Command, big: Path, tiny_gguf: Path, tmp_path: Path) -> None:
    small = tmp_path / "small.toml"
    small.write_text("[device]\nmemory_budget_gib = 0.1\n")
    arguments = ("pair", "--verifier", big, "--draft", tiny_gguf, "--profile", small, "--out", tmp_path / "pair")
    code, printed, err = quantize(*arguments)
    assert (code, printed) == (15, "")
    for part in ("verifier weights Q4_K_M", "verifier KV cache", "draft weights int8", "runtime", "102 MiB: "):
        assert part in err
    assert "would fit: " in only_error((code, printed, err))
    assert names(tmp_path) == {"small.toml"}


# ------------------------------------------------------------------------------------------------------------- reports


def test_a_report_of_a_file(quantize: Command, big: Path, tmp_path: Path) -> None:
    assert quantize("verifier", big, "--out", tmp_path / "q.gguf", "--type", "Q8_0")[0] == 0
    arguments = ("report", tmp_path / "q.gguf", "--against", big, "--max-tokens", "60", "--profile", "cpu-small")
    code, printed, err = quantize(*arguments, "--json")
    assert code == 0, err
    content = json.loads(printed)
    assert set(content) == {"model"}
    assert 0.8 < content["model"]["agreement"] <= 1
    code, printed, _ = quantize(*arguments)
    assert code == 0
    assert "agreement" in printed


def test_a_report_of_a_pair(quantize: Command, big: Path, tiny_gguf: Path, tmp_path: Path) -> None:
    out, text = tmp_path / "pair", tmp_path / "text.txt"
    text.write_text("the king and the ring\n" * 20)
    made = quantize("pair", "--verifier", big, "--draft", tiny_gguf, "--profile", "auto", "--out", out)
    assert made[0] == 0
    assert f"edgespec run --pair {out}\n" in made[2]
    options = ("--text", text, "--max-tokens", "40", "--threads", "1", "--json")
    both, draft = (quantize("report", out, "--against", source, *options) for source in (big, tiny_gguf))
    assert (both[0], draft[0]) == (0, 0)
    content = json.loads(both[1])
    assert set(content) == {"draft", "verifier"}
    assert content["verifier"]["agreement"] > content["draft"]["agreement"]
    content = json.loads(draft[1])
    assert set(content) == {"draft"}  # another model's text says nothing about the verifier
    assert content["draft"]["agreement"] > 0.8


def test_a_report_of_nothing(quantize: Command, big: Path, tmp_path: Path) -> None:
    assert quantize("report", "no-such-pair", "--against", big)[0] == 6
    assert quantize("report", tmp_path / "no.gguf", "--against", big)[0] == 3
    assert quantize("report", big, "--against", tmp_path / "no.gguf")[0] == 3


# --------------------------------------------------------------------------------------------------------------- help


@pytest.mark.parametrize("what", ["", "draft", "verifier", "pair", "report"])
def test_help_imports_nothing_heavy(what: str) -> None:
    script = (
        f"import sys; sys.argv = {['edgespec', 'quantize', *([what] if what else []), '--help']!r}\n"
        "from edgespec.cli.main import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "heavy = ('numpy', 'onnx', 'onnxruntime', 'llama_cpp', 'gguf', 'quantize', 'psutil')\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "Usage: edgespec quantize" in done.stdout
    assert done.stdout.endswith("[]\n")


def test_every_command_says_what_the_others_say() -> None:
    """Options of one name mean one thing everywhere."""
    helps: dict[str, set[Any]] = {}
    for each in command.quantize.commands.values():
        for option in each.params:
            with contextlib.suppress(AttributeError):
                helps.setdefault(option.opts[0], set()).add(option.help)
    shared = ("--json", "--force", "--threads", "--head-vocab", "--corpus", "--imatrix", "--requantize")
    assert all(len(helps[name]) == 1 for name in shared)
