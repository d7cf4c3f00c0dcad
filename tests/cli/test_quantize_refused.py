"""``edgespec quantize`` refuses: bad sources, what does not fit together, what is there already."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgespec.pairs import load_pair
from tests.cli.terminal import Command, names, only_error


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
def test_bad_sources_of_a_draft(quantize: Command, what: str, tiny_gguf: Path, tmp_path: Path) -> None:
    path, code, words = bad_sources(tiny_gguf, tmp_path)[what]
    (tmp_path / "out").mkdir()
    result = quantize("draft", path, "--out", tmp_path / "out" / "d")
    assert words in only_error(result)
    assert result[0] in (code, 3)
    assert names(tmp_path / "out") == set()


@pytest.mark.parametrize("what", ["missing", "truncated", "garbage", "empty folder"])
def test_bad_sources_of_a_verifier(quantize: Command, what: str, tiny_gguf: Path, tmp_path: Path) -> None:
    path, _, _ = bad_sources(tiny_gguf, tmp_path)[what]
    (tmp_path / "out").mkdir()
    verifier = quantize("verifier", path, "--out", tmp_path / "out" / "q.gguf", "--type", "Q8_0")
    pair = quantize(
        "pair", "--verifier", path, "--draft", tiny_gguf, "--profile", "auto", "--out", tmp_path / "out" / "p"
    )
    assert path.name in only_error(verifier)
    assert path.name in only_error(pair)
    assert names(tmp_path / "out") == set()


def test_a_path_that_cannot_be_reached_is_named(quantize: Command, big: Path, tmp_path: Path) -> None:
    long = tmp_path / ("a" * 300)
    for arguments in (
        ("draft", long, "--out", tmp_path / "d"),
        ("draft", big, "--out", long / "d"),
        ("pair", "--verifier", long, "--draft", big, "--profile", "cpu-small", "--out", tmp_path / "p"),
    ):
        line = only_error(quantize(*arguments))
        assert line.startswith(f"Error: {long}"), arguments
        assert line.endswith(": File name too long; check the path and its permissions"), arguments
    assert names(tmp_path) == set()


def test_bad_profiles_and_vocabularies(quantize: Command, big: Path, tiny_gguf: Path, tmp_path: Path) -> None:
    other = replaced(tiny_gguf, tmp_path, b"<|endoftext|>", b"<|endOfText|>")
    bad = tmp_path / "bad.toml"
    bad.write_text("[draft]\nbitz = 4\n")
    arguments = ("pair", "--verifier", big, "--out", tmp_path / "pair")
    result = quantize(*arguments, "--draft", other, "--profile", "auto")
    assert result[0] == 7
    assert "token 0 is" in only_error(result)
    assert only_error(quantize(*arguments, "--draft", tiny_gguf, "--profile", "cpu-smal")).count("cpu-small")
    assert "bits" in only_error(quantize(*arguments, "--draft", tiny_gguf, "--profile", bad))
    assert not (tmp_path / "pair").exists()


def test_what_is_damaged_later_is_noticed(quantize: Command, big: Path, tiny_gguf: Path, tmp_path: Path) -> None:
    out = tmp_path / "pair"
    quantize("pair", "--verifier", big, "--draft", tiny_gguf, "--profile", "auto", "--out", out, "--type", "F32")
    verifier, manifest = out / "verifier.gguf", out / "pair.toml"
    data = bytearray(verifier.read_bytes())
    data[-1] ^= 1
    verifier.write_bytes(data)
    with pytest.raises(Exception, match="SHA-256"):
        load_pair(str(out)).verifier.check(verifier)
    manifest.write_text(manifest.read_text().replace("format = 1", "format = [1"))
    assert "not valid TOML" in only_error(quantize("report", out, "--against", big))


@pytest.mark.parametrize("what", ["draft", "verifier", "pair"])
def test_existing_output_needs_force(quantize: Command, what: str, big: Path, tiny_gguf: Path, tmp_path: Path) -> None:
    sources = {
        "draft": ("draft", tiny_gguf),
        "verifier": ("verifier", big, "--type", "Q8_0"),
        "pair": ("pair", "--verifier", big, "--draft", tiny_gguf, "--profile", "auto"),
    }
    arguments = (*sources[what], "--out", tmp_path / "out")
    assert quantize(*arguments)[0] == 0
    stamp = (tmp_path / "out").stat().st_ino
    result = quantize(*arguments)
    assert result[0] == 5
    assert "force" in only_error(result)
    assert (tmp_path / "out").stat().st_ino == stamp
    assert quantize(*arguments, "--force")[0] == 0
    assert (tmp_path / "out").stat().st_ino != stamp
    assert names(tmp_path) == {"out"}


def test_a_source_is_never_written(quantize: Command, big: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(big.read_bytes())
    for arguments in (("verifier", copy, "--type", "Q8_0"), ("draft", copy)):
        assert quantize(*arguments, "--out", copy, "--force")[0] == 5
    assert copy.read_bytes() == big.read_bytes()
