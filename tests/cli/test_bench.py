"""``edgespec bench``: every figure it prints is said to be a simulation's."""

from __future__ import annotations

import json
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from edgespec.cli.bench import bench
from edgespec.errors import EdgespecError, ModelNotFoundError, ParameterError, PromptError


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    (tmp_path / "suite.jsonl").write_text('{"category": "qa", "turns": ["the cat"]}\n' * 2, encoding="utf-8")
    return tmp_path / "suite.jsonl"


@pytest.fixture
def models(tiny_gguf: Path, own_folder: Path, suite: Path) -> tuple[object, ...]:
    return "--verifier", tiny_gguf, "--draft", own_folder, "--suite", suite, "--every", 2, "--max-tokens", 8


def run(*options: object) -> Result:
    return CliRunner().invoke(bench, [*map(str, options)])


def test_the_table_says_simulation_and_has_a_row_a_profile(models: tuple[object, ...]) -> None:
    result = run("--simulate", "workstation-24gb", "--simulate", "raspberry-pi-5", *models)
    assert result.exit_code == 0, result.exception
    lines = result.stdout.splitlines()
    assert lines[0] == "SIMULATION, not a measurement of these devices"
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[2:]]
    assert cells[0][4:9] == [
        "plain, tokens/s", "sequential, tokens/s", "overlapped, tokens/s", "auto, tokens/s", "overlapped / sequential",
    ]  # fmt: skip
    assert [row[0] for row in cells[2:]] == ["workstation-24gb", "raspberry-pi-5"]
    assert {len(row) for row in cells} == {len(cells[0])}
    assert "simulated: 1 prompts, at most 8 tokens each" in result.stderr
    assert "source: NVIDIA Ada" in result.stderr
    assert "source: Raspberry Pi 5 product brief" in result.stderr


def test_json_says_simulated_at_every_level(models: tuple[object, ...]) -> None:
    result = run("--simulate", "workstation-8gb", "--modes", "sequential, plain", "--json", *models)
    assert result.exit_code == 0, result.exception
    content = json.loads(result.stdout)
    (profile,) = content["profiles"]
    assert content["simulated"] is profile["simulated"] is True
    assert [*profile["tokens_per_s"]] == ["plain", "sequential"]
    assert profile["verify_ms"]["1"] > profile["draft_token_ms"] > 0


def test_without_plain_there_are_rates_only(models: tuple[object, ...]) -> None:
    result = run("--simulate", "workstation-8gb", "--modes", "overlapped", "--draft-length", 2, *models)
    assert result.exit_code == 0, result.exception
    assert "(" not in result.stdout.splitlines()[-1]
    assert "overlapped / sequential" not in result.stdout


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ((), click.UsageError, "all that bench can do yet is simulate"),
        (("--simulate", "toaster"), ParameterError, "got 'toaster'; allowed: auto, cpu-small"),
        (("--simulate", "auto", "--modes", "plain,fast"), ParameterError, "modes: got 'fast'; allowed: plain"),
        (("--simulate", "auto", "--modes", ""), ParameterError, "modes: got ''; allowed: plain"),
        (("--simulate", "auto", "--draft-length", 99), ParameterError, "draft length"),
        (("--simulate", "auto", "--temperature", -1), ParameterError, "temperature"),
        (("--simulate", "auto", "--draft", "none"), click.UsageError, "leaves nothing to compare"),
        (("--simulate", "auto", "--verifier", "nowhere.gguf"), ModelNotFoundError, "nowhere.gguf"),
        (("--simulate", "auto", "--suite", __file__), PromptError, "line 1"),
    ],
)
def test_bad_options_are_refused_on_one_line(
    options: tuple[object, ...], error: type[EdgespecError] | type[click.UsageError], says: str
) -> None:
    with pytest.raises(error, match=says) as caught:
        bench.main([*map(str, options)], standalone_mode=False)
    assert "\n" not in str(caught.value)
