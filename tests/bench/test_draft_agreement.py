"""The command that measures a draft on its verifier's answers still runs: over tiny models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.bench import draft_agreement

CATEGORIES = ("writing", "qa", "translation", "qa", "roleplay")


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    lines = [json.dumps({"category": name, "turns": [f"the cat {i}", "no"]}) for i, name in enumerate(CATEGORIES)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return tmp_path / "prompts.jsonl"


def run(*arguments: object) -> tuple[int, list[str], str]:
    result = CliRunner().invoke(draft_agreement.main, [*map(str, arguments), "--threads", "1"])
    assert isinstance(result.exception, SystemExit | None), result.exception
    return result.exit_code, result.stdout.splitlines(), result.stderr


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.split("|")[1:-1]]


def test_it_prints_a_row_a_category_and_a_row_a_length(prompts: Path, tiny_gguf: Path, own_folder: Path) -> None:
    models = ("--draft", own_folder, "--draft", own_folder, "--verifier", tiny_gguf)
    code, lines, _ = run(prompts, *models, "--every", 1, "--max-tokens", 10, "--slots", 2)
    assert code == 0
    assert lines[0].startswith("draft: ")
    assert lines[1].endswith("; 5 prompts")
    table = [cells(line) for line in lines if line.startswith("| ")]
    assert len(table) == 2 * (1 + 4 + 1 + 9)
    assert [row[0] for row in table[:5]] == ["category", "translation", "qa", "multi-turn", "all"]
    assert table[4][2] == "1.000"  # the draft is the verifier
    assert float(table[4][3]) > 0.9  # what is drawn may be what rounding decides
    assert [row[0] for row in table[6:15]] == [str(length) for length in range(9)]


def test_every_takes_fewer(prompts: Path, tiny_gguf: Path, own_folder: Path) -> None:
    models = ("--draft", own_folder, "--verifier", tiny_gguf)
    _, lines, _ = run(prompts, *models, "--every", 3, "--max-tokens", 2)
    assert lines[1].endswith("; 2 prompts")


def test_what_is_wrong_is_one_line(prompts: Path, own_folder: Path) -> None:
    code, lines, said = run(prompts, "--draft", own_folder, "--verifier", prompts)
    assert (code, lines) == (4, [])
    assert said.splitlines()[-1].startswith(str(prompts))
