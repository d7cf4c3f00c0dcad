"""The measuring commands still run: over a tiny model, with costs that mean nothing."""

from __future__ import annotations

import collections.abc as abc
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
from click.testing import CliRunner, Result

from edgespec.core.policy import Fixed
from edgespec.engine.lossless import Divergence
from edgespec.runtime import Runtime
from tests.bench import lossless, recipes, sampling, speedup
from tests.tiny import TinyConfig, write_gguf

CATEGORIES = ("qa", "writing", "qa", "roleplay")


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    lines = [
        json.dumps({"category": category, "turns": ["the cat " * (1 + i), "never asked"]})
        for i, category in enumerate(CATEGORIES)
    ]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return tmp_path / "prompts.jsonl"


def run(command: click.Command, prompts: Path, *options: object) -> Result:
    return CliRunner().invoke(command, [str(prompts), "--threads", "1", *map(str, options)])


@pytest.fixture
def models(tiny_gguf: Path, own_folder: Path) -> tuple[object, ...]:
    return "--verifier", tiny_gguf, "--draft", own_folder, "--max-tokens", 12


def test_speedup_prints_a_row_a_category(prompts: Path, models: tuple[object, ...]) -> None:
    result = run(speedup.main, prompts, *models, "--every", 1, "--draft-lengths", "1,3")
    assert result.exit_code == 0, result.exception
    lines = result.output.splitlines()
    assert lines[1] == "| decode | plain, tokens/s | length 1 | length 3 |"
    assert [line.split(" |")[0] for line in lines[3:6]] == ["| qa (2)", "| multi-turn (2)", "| all (4)"]
    assert "end to end" not in result.output
    assert lines[6] == "length 1: acceptance 1.00, 4 of 4 answers equal plain's"
    assert lines[7] == "length 3: acceptance 1.00, 4 of 4 answers equal plain's"


def test_speedup_cold_prints_end_to_end_rates_too(prompts: Path, models: tuple[object, ...]) -> None:
    result = run(speedup.main, prompts, *models, "--every", 2, "--offset", 1, "--draft-lengths", "2", "--cold")
    assert result.exit_code == 0, result.exception
    assert "| end to end | plain, tokens/s | length 2 |" in result.output
    assert result.output.count("| multi-turn (2) |") == 2


def test_speedup_measures_each_length_in_turn(prompts: Path, monkeypatch: pytest.MonkeyPatch, tiny_gguf: Path) -> None:
    asked: list[tuple[str, int, float]] = []

    def measure(runtime: Runtime, prompt: str, params: Any, policy: Fixed, cold: bool) -> Any:
        asked.append((prompt, policy.length, policy.min_confidence))
        return speedup.Cost(10, 2.0, 8, 1.0 / (1 + policy.length), 4, 3), (1, policy.length > 2)

    monkeypatch.setattr(speedup, "measure", measure)
    options = ("--verifier", tiny_gguf, "--every", 3, "--draft-lengths", "1,3", "--min-confidence", 0.5)
    output = run(speedup.main, prompts, *options).output
    first, second = "the cat ", "the cat " * 4
    assert asked == [(first, n, 0.5) for n in (0, 1, 3)] + [(second, n, 0.5) for n in (1, 3, 0)]
    assert "| all (2) | 8.0 | 2.00 | 4.00 |" in output
    assert "length 1: acceptance 0.75, 2 of 2 answers equal plain's" in output
    assert "length 3: acceptance 0.75, 0 of 2 answers equal plain's" in output


def test_lossless_counts_and_finds_nothing(prompts: Path, models: tuple[object, ...]) -> None:
    result = run(lossless.main, prompts, *models, "--count", 2)
    assert result.exit_code == 0, result.exception
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in result.output.splitlines()[2:]]
    assert [(row[0], row[1], row[2], *row[4:]) for row in rows] == [
        ("0.0", "2", "24", "2", "0", "0"),
        ("0.8", "2", "24", "2", "0", "0"),
    ]
    assert all(float(row[3]) > 0.5 for row in rows)


@pytest.mark.parametrize(("explained", "code"), [(True, 0), (False, 1)])
def test_lossless_fails_for_an_unexplained_difference(
    prompts: Path, models: tuple[object, ...], monkeypatch: pytest.MonkeyPatch, explained: bool, code: int
) -> None:
    found = (Divergence(3, 5, 6, 4, 0.5, 0.01, explained),)
    generate = Runtime.generate

    def differing(self: Runtime, *arguments: Any, **options: Any) -> Any:
        return replace(generate(self, *arguments, **options), divergences=found)

    monkeypatch.setattr(Runtime, "generate", differing)
    result = run(lossless.main, prompts, *models, "--count", 1, "--temperature", 0)
    assert result.exit_code == code
    assert f"| 0 | 1 | {code} |" in result.output
    assert str(found[0]) in result.output


def test_sampling_prints_a_row_a_setting(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    calls: list[object] = []

    def once(call: abc.Callable[[], object]) -> float:
        calls.append(call())
        return 1.25

    monkeypatch.setattr(sampling, "micros", once)
    monkeypatch.setattr(sampling, "VOCABULARIES", (4000,))
    sampling.main()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "| vocabulary | what | distribution, us | pick, us |"
    assert [line.split(" | ")[1] for line in lines[3:10]] == list(sampling.SETTINGS)
    assert len(lines) == 2 + 1 + len(sampling.SETTINGS) + 4
    assert len(calls) == 1 + 2 * len(sampling.SETTINGS) + 4


def test_the_rows_have_some_that_stand_out() -> None:
    rows = sampling.make_rows(2, 4000)
    assert rows.shape == (2, 4000)
    assert all(10 < np.count_nonzero(row > row.mean() + 4 * row.std()) < 200 for row in rows)


def test_the_time_of_a_call_is_positive() -> None:
    assert sampling.micros(lambda: sum(range(1000))) > 0


def test_recipes_prints_a_row_a_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(recipes, "HEADS", (80, 60))
    source = write_gguf(tmp_path / "tiny.gguf", TinyConfig(num_layers=4))
    (tmp_path / "text.txt").write_text("the king and the ring in the well " * 40, encoding="utf-8")
    text = ("--corpus", tmp_path / "text.txt", "--text", tmp_path / "text.txt", "--max-tokens", 40, "--rounds", 1)
    assert recipes.main([*map(str, (source, *text))]) == 0
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines()]
    assert [row[2] for row in rows[2:]] == ["320", "80", "60"] * 5 + ["320"]
    blocks = [["fp32", ""], ["int8", "32"], ["int8", "128"], ["int4", "32"], ["int4", "128"]]
    assert [row[:2] for row in rows[2::3]] == [*blocks, ["tiny in llama.cpp", ""]]
