"""The doctor's trial run, and that it never fails itself."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from edgespec import doctor
from edgespec.doctor import Finding, Job, diagnose, first_problem, models
from edgespec.doctor.finding import of_error, said
from edgespec.errors import (
    BackendError,
    EdgespecError,
    MemoryBudgetError,
    ModelFormatError,
    ParameterError,
)
from tests.doctor.patients import WHATS, look, only_problem


def answered(code: int, out: bytes, err: bytes = b"") -> Any:
    return lambda arguments, timeout_s: subprocess.CompletedProcess(arguments, code, out, err)


def test_deep_answers_a_prompt(pair: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    content = {"completion_tokens": 8, "tokens_per_s": 12.3, "mode": "sequential"}
    monkeypatch.setattr(models, "child", answered(0, json.dumps(content).encode()))
    stages: list[str] = []
    findings = list(diagnose(Job(**pair, deep=True), lambda stage, fraction: stages.append(stage)))
    assert [finding.what for finding in findings] == [*WHATS, "calibration", "trial run"]
    assert findings[-1].detail == "8 tokens at 12.3 tokens/s, sequential"
    assert "answering a prompt" in stages


def test_deep_reads_the_draft_against_its_hashes(
    pair: dict[str, Any], own_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "child", answered(0, b'{"completion_tokens": 8, "tokens_per_s": 1, "mode": "plain"}'))
    folder = shutil.copytree(own_folder, tmp_path / "damaged")
    (folder / "tokens.json").write_text((folder / "tokens.json").read_text(encoding="utf-8") + " ", encoding="utf-8")
    pair["draft"] = str(folder)
    assert first_problem(look(**pair)) is None
    assert "SHA-256" in only_problem(look(**pair, deep=True), "draft model", ModelFormatError).detail


@pytest.mark.parametrize(("code", "error"), [(15, MemoryBudgetError), (10, BackendError), (-6, BackendError)])
def test_deep_says_why_there_is_no_answer(
    code: int, error: type[EdgespecError], pair: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "child", answered(code, b"", b"edgespec: hm\nError: too large; take another\n"))
    problem = only_problem(look(**pair, deep=True), "trial run", error)
    assert (problem.detail, problem.remedy) == ("too large", "take another")


def test_deep_runs_what_was_asked_for(pair: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []

    def child(arguments: list[str], timeout_s: float) -> subprocess.CompletedProcess[bytes]:
        seen.append(arguments)
        raise subprocess.TimeoutExpired(arguments, timeout_s)

    monkeypatch.setattr(models, "child", child)
    problem = only_problem(look(**pair, threads=1, context=99, mode="sequential", deep=True), "trial run", BackendError)
    assert "no answer within" in problem.detail
    line = " ".join(seen[0])
    assert f"--verifier {pair['verifier']} --draft {pair['draft']} --context 99 --threads 1 --mode sequential" in line


# It never fails itself


@pytest.mark.parametrize(
    "error", [TypeError("a\nb"), KeyError("x"), RecursionError(), OSError(5, "I/O error", "/dev/x")]
)
@pytest.mark.parametrize("number", range(len(doctor.CHECKS)))
def test_a_check_that_fails_is_a_finding(number: int, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(case: Any) -> Finding:
        raise error

    checks = [doctor.Check(check.what, lambda case: [], check.needs) for check in doctor.CHECKS]
    checks[number] = doctor.Check("broken", fail)
    monkeypatch.setattr(doctor, "CHECKS", checks)
    (found,) = look()
    assert (found.what, found.status) == ("broken", "problem")
    assert "\n" not in found.detail
    assert found.remedy


def test_a_message_is_split_where_it_says_what_to_do() -> None:
    assert said("x", "note", "a; b; c d").as_dict() == {
        "what": "x",
        "status": "note",
        "detail": "a; b",
        "remedy": "c d",
    }
    assert said("x", "note", "nothing to do").remedy == ""
    assert of_error("x", ParameterError("got 1; allowed: 2")).error is ParameterError


def test_one_fact_one_place() -> None:
    assert [
        check.what for check in doctor.CHECKS if check.what not in {"workers", "pair", "calibration", "trial run"}
    ] == WHATS
