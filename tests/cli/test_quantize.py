"""``edgespec quantize`` on real tiny models: what it makes and prints, what it refuses, what an interruption leaves."""

from __future__ import annotations

import collections.abc as abc
import contextlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from edgespec.cli import main as entry
from edgespec.cli import quantize as command
from edgespec.devices.profile import load_profile
from edgespec.loading import choose_profile
from edgespec.pairs import load_pair
from tests.tiny import TinyConfig, write_gguf

Result = tuple[int, str, str]
Edgespec = abc.Callable[..., Result]

BIG = TinyConfig(width=128, num_layers=3, num_heads=4, num_hidden=256, seed=5)


@pytest.fixture
def edgespec(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Edgespec:
    """Runs the command in this process: exit code, standard output, standard error."""

    def run(*arguments: str | Path) -> Result:
        monkeypatch.setattr(sys, "argv", ["edgespec", "quantize", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            entry.main()
        out, err = capsys.readouterr()
        code = ended.value.code
        return (code if isinstance(code, int) else 0), out, err

    return run


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("big") / "big.gguf", BIG)


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


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def only_error(result: Result) -> str:
    """A failure's one line, without those that say how far it came."""
    code, out, err = result
    lines = [line for line in err.splitlines() if line.startswith("Error: ")]
    assert code != 0
    assert out == ""
    assert len(lines) == 1
    assert err.splitlines()[-1] == lines[0]
    assert "Traceback" not in err
    return lines[0]


# -------------------------------------------------------------------------------------------------------------- drafts


def test_a_draft(edgespec: Edgespec, tiny_gguf: Path, tmp_path: Path) -> None:
    out = tmp_path / "my draft"
    code, printed, err = edgespec("draft", tiny_gguf, "--out", out)
    assert code == 0
    assert "8 bits" in printed
    assert str(out) in printed
    assert f"--draft '{out}'" in err
    manifest = (out / "draft.toml").read_text()
    assert "bits = 8\nblock_size = 32\n" in manifest
    assert "d2t" not in manifest
    assert names(tmp_path) == {"my draft"}


def test_options_win_over_the_profile(
    edgespec: Edgespec, tiny_gguf: Path, profile: Path, corpus: Path, tmp_path: Path
) -> None:
    common = ("draft", tiny_gguf, "--profile", profile, "--corpus", corpus, "--json")
    code, printed, _ = edgespec(*common, "--out", tmp_path / "profiled")
    content = json.loads(printed)
    assert code == 0
    assert (content["bits"], content["block_size"], content["head_vocab"], content["layers"]) == (4, 64, 80, None)
    assert 0.9 < content["coverage"] <= 1
    options = ("--bits", "8", "--block-size", "16", "--head-vocab", "0", "--layers", "1")
    _, printed, _ = edgespec(*common, *options, "--out", tmp_path / "own")
    content = json.loads(printed)
    assert (content["bits"], content["block_size"], content["head_vocab"]) == (8, 16, None)
    assert content["layers"] == [1]
    manifest = (tmp_path / "own" / "draft.toml").read_text()
    assert "num_layers = 1\n" in manifest
    assert "block_size = 16\n" in manifest


def test_a_trimmed_head_says_what_it_covers(edgespec: Edgespec, tiny_gguf: Path, corpus: Path, tmp_path: Path) -> None:
    arguments = ("draft", tiny_gguf, "--out", tmp_path / "d", "--head-vocab", "64", "--corpus", corpus)
    code, printed, _ = edgespec(*arguments)
    assert code == 0
    assert "head of 64 ids: they are " in printed
    assert "%" in printed
    assert "Error" in edgespec(*arguments)[2]  # before anything is counted
    assert "counting" not in edgespec(*arguments)[2]
    assert edgespec(*arguments, "--force")[0] == 0


def test_a_corpus_without_a_head_to_choose(
    edgespec: Edgespec, big: Path, tiny_gguf: Path, corpus: Path, tmp_path: Path
) -> None:
    common = ("--out", tmp_path / "d", "--corpus", corpus)
    assert "head_vocab" in only_error(edgespec("draft", tiny_gguf, *common))
    (tmp_path / "whole.toml").write_text("[draft]\nhead_vocab = 0\n")
    pair = ("pair", "--verifier", big, "--draft", tiny_gguf, "--profile", tmp_path / "whole.toml")
    assert "head_vocab" in only_error(edgespec(*pair, *common))
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
def test_layers_that_are_none(edgespec: Edgespec, text: str, tiny_gguf: Path, tmp_path: Path) -> None:
    result = edgespec("draft", tiny_gguf, "--out", tmp_path / "d", "--layers", text)
    assert result[0] == 2
    assert "0,1,26-29" in only_error(result)


# ----------------------------------------------------------------------------------------------------------- verifiers


def test_a_verifier(edgespec: Edgespec, big: Path, profile: Path, tmp_path: Path) -> None:
    code, printed, err = edgespec("verifier", big, "--out", tmp_path / "q.gguf", "--type", "q4_k_m")
    assert code == 0
    assert "Q4_K_M" in printed
    assert f"--verifier {tmp_path / 'q.gguf'}" in err
    size = (tmp_path / "q.gguf").stat().st_size
    assert size < big.stat().st_size / 2
    code, printed, _ = edgespec("verifier", big, "--out", tmp_path / "p.gguf", "--profile", profile, "--json")
    assert json.loads(printed)["type"] == "Q5_K_M"
    assert json.loads(printed)["size_bytes"] == (tmp_path / "p.gguf").stat().st_size > size


def test_a_verifier_of_no_type_is_a_usage_error(edgespec: Edgespec, big: Path, tmp_path: Path) -> None:
    result = edgespec("verifier", big, "--out", tmp_path / "q.gguf")
    assert result[0] == 2
    assert "--type" in only_error(result)
    assert only_error(edgespec("verifier", big, "--out", tmp_path / "q.gguf", "--type", "Q4")).count("Q4_K_M")
    assert "got ''; allowed" in only_error(edgespec("verifier", big, "--out", tmp_path / "q.gguf", "--type", ""))


def test_a_quantized_verifier_needs_permission(edgespec: Edgespec, big: Path, tmp_path: Path) -> None:
    assert edgespec("verifier", big, "--out", tmp_path / "a.gguf", "--type", "Q8_0")[0] == 0
    again = ("verifier", tmp_path / "a.gguf", "--out", tmp_path / "b.gguf", "--type", "Q4_K_M")
    assert "quantized already" in only_error(edgespec(*again))
    assert edgespec(*again, "--requantize")[0] == 0


# --------------------------------------------------------------------------------------------------------------- pairs


def test_a_pair(edgespec: Edgespec, big: Path, tiny_gguf: Path, profile: Path, corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "pair"
    arguments = ("pair", "--verifier", big, "--draft", tiny_gguf, "--profile", profile, "--corpus", corpus)
    code, printed, err = edgespec(*arguments, "--out", out)
    assert code == 0, err
    for part in ("verifier weights Q5_K_M", "draft KV cache", "main memory", "fits", "head of 80 ids"):
        assert part in printed
    assert f"edgespec run --pair {out}\n" in err
    assert choose_profile(None, str(out)) == load_profile(str(profile))  # found though nobody knows it by its name
    assert load_pair(str(out)).profile == "mine"
    code, printed, _ = edgespec(*arguments, "--out", out, "--force", "--json", "--type", "Q8_0", "--head-vocab", "0")
    content = json.loads(printed)
    assert (code, printed.count("\n")) == (0, 1)
    assert (content["path"], content["profile"], content["verifier"]["type"]) == (str(out), "mine", "Q8_0")
    assert "coverage" not in content["draft"]
    assert content["memory"]["fits"]
    assert sum(line["bytes"] for line in content["memory"]["lines"]) == content["memory"]["main_bytes"]


def test_a_pair_that_does_not_fit_shows_its_plan(
    edgespec: Edgespec, big: Path, tiny_gguf: Path, tmp_path: Path
) -> None:
    small = tmp_path / "small.toml"
    small.write_text("[device]\nmemory_budget_gib = 0.1\n")
    arguments = ("pair", "--verifier", big, "--draft", tiny_gguf, "--profile", small, "--out", tmp_path / "pair")
    code, printed, err = edgespec(*arguments)
    assert (code, printed) == (15, "")
    for part in ("verifier weights Q4_K_M", "verifier KV cache", "draft weights int8", "runtime", "102 MiB: "):
        assert part in err
    assert "would fit: " in only_error((code, printed, err))
    assert names(tmp_path) == {"small.toml"}


# ------------------------------------------------------------------------------------------------------------- reports


def test_a_report_of_a_file(edgespec: Edgespec, big: Path, tmp_path: Path) -> None:
    assert edgespec("verifier", big, "--out", tmp_path / "q.gguf", "--type", "Q8_0")[0] == 0
    arguments = ("report", tmp_path / "q.gguf", "--against", big, "--max-tokens", "60", "--profile", "cpu-small")
    code, printed, err = edgespec(*arguments, "--json")
    assert code == 0, err
    content = json.loads(printed)
    assert set(content) == {"model"}
    assert 0.8 < content["model"]["agreement"] <= 1
    code, printed, _ = edgespec(*arguments)
    assert code == 0
    assert "agreement" in printed


def test_a_report_of_a_pair(edgespec: Edgespec, big: Path, tiny_gguf: Path, tmp_path: Path) -> None:
    out, text = tmp_path / "pair", tmp_path / "text.txt"
    text.write_text("the king and the ring\n" * 20)
    made = edgespec("pair", "--verifier", big, "--draft", tiny_gguf, "--profile", "auto", "--out", out)
    assert made[0] == 0
    assert f"edgespec run --pair {out}\n" in made[2]
    options = ("--text", text, "--max-tokens", "40", "--threads", "1", "--json")
    both, draft = (edgespec("report", out, "--against", source, *options) for source in (big, tiny_gguf))
    assert (both[0], draft[0]) == (0, 0)
    content = json.loads(both[1])
    assert set(content) == {"draft", "verifier"}
    assert content["verifier"]["agreement"] > content["draft"]["agreement"]
    content = json.loads(draft[1])
    assert set(content) == {"draft"}  # another model's text says nothing about the verifier
    assert content["draft"]["agreement"] > 0.8


def test_a_report_of_nothing(edgespec: Edgespec, big: Path, tmp_path: Path) -> None:
    assert edgespec("report", "no-such-pair", "--against", big)[0] == 6
    assert edgespec("report", tmp_path / "no.gguf", "--against", big)[0] == 3
    assert edgespec("report", big, "--against", tmp_path / "no.gguf")[0] == 3


# ----------------------------------------------------------------------------------------------------------- bad input


def truncated(source: Path, folder: Path) -> Path:
    path = folder / "truncated.gguf"
    path.write_bytes(source.read_bytes()[: source.stat().st_size // 2])
    return path


def replaced(source: Path, folder: Path, old: bytes, new: bytes) -> Path:
    path = folder / f"{new.decode('ascii', 'replace')}.gguf"
    path.write_bytes(source.read_bytes().replace(old, new))
    return path


def bad_sources(good: Path, folder: Path) -> dict[str, tuple[Path, int, str]]:
    """What it is: the path, the exit code, words of the message."""
    (folder / "empty").mkdir()
    (folder / "weights only").mkdir()
    (folder / "weights only" / "model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    garbage = folder / "garbage.gguf"
    garbage.write_bytes(bytes(range(256)) * 40)
    return {
        "missing": (folder / "nowhere.gguf", 3, "nowhere"),
        "truncated": (truncated(good, folder), 4, "truncated"),
        "garbage": (garbage, 4, "garbage"),
        "architecture": (replaced(good, folder, b"llama", b"bloom"), 4, "supported: llama, qwen2, qwen3, gemma3"),
        "folder without config": (folder / "weights only", 4, "config.json"),
        "empty folder": (folder / "empty", 4, "config.json"),
    }


@pytest.mark.parametrize(
    "what", ["missing", "truncated", "garbage", "architecture", "folder without config", "empty folder"]
)
def test_bad_sources_of_a_draft(edgespec: Edgespec, what: str, tiny_gguf: Path, tmp_path: Path) -> None:
    path, code, words = bad_sources(tiny_gguf, tmp_path)[what]
    (tmp_path / "out").mkdir()
    result = edgespec("draft", path, "--out", tmp_path / "out" / "d")
    assert words in only_error(result)
    assert result[0] in (code, 3)
    assert names(tmp_path / "out") == set()


@pytest.mark.parametrize("what", ["missing", "truncated", "garbage", "empty folder"])
def test_bad_sources_of_a_verifier(edgespec: Edgespec, what: str, tiny_gguf: Path, tmp_path: Path) -> None:
    path, _, _ = bad_sources(tiny_gguf, tmp_path)[what]
    (tmp_path / "out").mkdir()
    verifier = edgespec("verifier", path, "--out", tmp_path / "out" / "q.gguf", "--type", "Q8_0")
    pair = edgespec(
        "pair", "--verifier", path, "--draft", tiny_gguf, "--profile", "auto", "--out", tmp_path / "out" / "p"
    )
    assert path.name in only_error(verifier)
    assert path.name in only_error(pair)
    assert names(tmp_path / "out") == set()


def test_a_path_that_cannot_be_reached_is_named(edgespec: Edgespec, big: Path, tmp_path: Path) -> None:
    long = tmp_path / ("a" * 300)
    for arguments in (
        ("draft", long, "--out", tmp_path / "d"),
        ("draft", big, "--out", long / "d"),
        ("pair", "--verifier", long, "--draft", big, "--profile", "cpu-small", "--out", tmp_path / "p"),
    ):
        line = only_error(edgespec(*arguments))
        assert line.startswith(f"Error: {long}"), arguments
        assert line.endswith(": File name too long; check the path and its permissions"), arguments
    assert names(tmp_path) == set()


def test_bad_profiles_and_vocabularies(edgespec: Edgespec, big: Path, tiny_gguf: Path, tmp_path: Path) -> None:
    other = replaced(tiny_gguf, tmp_path, b"<|endoftext|>", b"<|endOfText|>")
    bad = tmp_path / "bad.toml"
    bad.write_text("[draft]\nbitz = 4\n")
    arguments = ("pair", "--verifier", big, "--out", tmp_path / "pair")
    result = edgespec(*arguments, "--draft", other, "--profile", "auto")
    assert result[0] == 7
    assert "token 0 is" in only_error(result)
    assert only_error(edgespec(*arguments, "--draft", tiny_gguf, "--profile", "cpu-smal")).count("cpu-small")
    assert "bits" in only_error(edgespec(*arguments, "--draft", tiny_gguf, "--profile", bad))
    assert not (tmp_path / "pair").exists()


def test_what_is_damaged_later_is_noticed(edgespec: Edgespec, big: Path, tiny_gguf: Path, tmp_path: Path) -> None:
    out = tmp_path / "pair"
    edgespec("pair", "--verifier", big, "--draft", tiny_gguf, "--profile", "auto", "--out", out, "--type", "F32")
    verifier, manifest = out / "verifier.gguf", out / "pair.toml"
    data = bytearray(verifier.read_bytes())
    data[-1] ^= 1
    verifier.write_bytes(data)
    with pytest.raises(Exception, match="SHA-256"):
        load_pair(str(out)).verifier.check(verifier)
    manifest.write_text(manifest.read_text().replace("format = 1", "format = [1"))
    assert "not valid TOML" in only_error(edgespec("report", out, "--against", big))


@pytest.mark.parametrize("what", ["draft", "verifier", "pair"])
def test_existing_output_needs_force(edgespec: Edgespec, what: str, big: Path, tiny_gguf: Path, tmp_path: Path) -> None:
    sources = {
        "draft": ("draft", tiny_gguf),
        "verifier": ("verifier", big, "--type", "Q8_0"),
        "pair": ("pair", "--verifier", big, "--draft", tiny_gguf, "--profile", "auto"),
    }
    arguments = (*sources[what], "--out", tmp_path / "out")
    assert edgespec(*arguments)[0] == 0
    stamp = (tmp_path / "out").stat().st_ino
    result = edgespec(*arguments)
    assert result[0] == 5
    assert "force" in only_error(result)
    assert (tmp_path / "out").stat().st_ino == stamp
    assert edgespec(*arguments, "--force")[0] == 0
    assert (tmp_path / "out").stat().st_ino != stamp
    assert names(tmp_path) == {"out"}


def test_a_source_is_never_written(edgespec: Edgespec, big: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(big.read_bytes())
    for arguments in (("verifier", copy, "--type", "Q8_0"), ("draft", copy)):
        assert edgespec(*arguments, "--out", copy, "--force")[0] == 5
    assert copy.read_bytes() == big.read_bytes()


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
