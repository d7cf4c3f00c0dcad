"""``edgespec doctor`` as a command, over a tiny real pair on this very box."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from edgespec.cli import main as entry
from edgespec.cli.doctor import OPTIONS
from edgespec.doctor import Job
from edgespec.verifiers.llama_devices import list_devices
from tests.cli.terminal import run_command

ROOT = Path(__file__).parents[2]


class Terminal:
    def __init__(self, patch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._patch, self._capsys = patch, capsys

    def __call__(self, line: str) -> tuple[int, str, str]:
        return run_command(self._patch, self._capsys, "doctor", *shlex.split(line))


@pytest.fixture
def doctor(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Terminal:
    return Terminal(monkeypatch, capsys)


@pytest.fixture
def pair(tiny_gguf: Path, own_folder: Path) -> str:
    return f"--verifier {tiny_gguf} --draft {own_folder} --threads 1"


def test_a_healthy_pair(doctor: Terminal, pair: str) -> None:
    code, out, err = doctor(pair)
    assert (code, err) == (0, "")
    marks = {line.split(": ")[0].split()[0] for line in out.splitlines()}
    assert {"ok"} <= marks <= {"ok", "note", "->"}
    assert "\nok      tokenizer: the draft model speaks the verifier's 320 tokens, and opens on cpu\n" in out
    if len(list_devices()) == 1:
        assert "\nnote    GPU: llama.cpp lists none: both models run on the CPU\n" in out


def test_what_run_refuses_is_refused(doctor: Terminal, pair: str) -> None:
    code, out, err = doctor(f"{pair} --draft none --mode overlapped")
    assert (code, out) == (2, "")
    assert err == "Error: --mode overlapped needs a draft: it does not go with --draft none\n"


def test_as_json(doctor: Terminal, pair: str) -> None:
    code, out, err = doctor(f"{pair} --json")
    content = json.loads(out)
    assert (code, err, out.count("\n"), set(content), content["ok"]) == (0, "", 1, {"ok", "findings"}, True)
    for finding in content["findings"]:
        assert list(finding) == ["what", "status", "detail", "remedy"]
        assert finding["status"] in ("ok", "note")


def test_a_problem_has_its_remedy_and_its_exit_code(doctor: Terminal, pair: str) -> None:
    code, out, err = doctor(f"{pair} --draft /no/such/draft")
    assert code == 3
    assert "\nPROBLEM draft model: no draft model at /no/such/draft\n        -> give a draft folder" in out
    assert err == "Error: `edgespec run` would not run as configured: draft model; each line above says what to do\n"
    code, out, err = doctor(f"{pair} --draft /no/such/draft --json")
    content = json.loads(out)
    assert (code, content["ok"]) == (3, False)
    assert [finding["what"] for finding in content["findings"] if finding["status"] == "problem"] == ["draft model"]


def test_the_first_problem_gives_the_exit_code(doctor: Terminal, tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text("[draft]\nbit = 8", encoding="utf-8")
    code, out, err = doctor(f"--profile {tmp_path / 'bad.toml'} --verifier {tmp_path / 'none.gguf'}")
    assert code == 14
    assert "profile, verifier; each line above" in err
    assert out.count("PROBLEM") == 2


@pytest.mark.parametrize("line", ["--threads 0", "--context x", "--mode fast", "--pears x", "more"])
def test_bad_options_get_one_line(doctor: Terminal, line: str) -> None:
    code, out, err = doctor(line)
    assert (code, out, err.count("\n")) == (2, "", 1)


def test_the_options_are_those_of_a_job_and_of_run() -> None:
    def names(command: str) -> set[str]:
        found = entry.cli.get_command(None, command)  # type: ignore[arg-type]
        assert found is not None
        return {str(option.name) for option in found.params}

    assert names("doctor") == {*Job.__dataclass_fields__, "as_json"}
    assert len(OPTIONS) == len(Job.__dataclass_fields__)
    assert names("doctor") - {"deep", "as_json", "rpc"} <= names("run")


def test_as_a_user_starts_it(pair: str) -> None:
    command = [sys.executable, "-m", "edgespec", "doctor", *shlex.split(pair), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert (done.returncode, done.stderr, json.loads(done.stdout)["ok"]) == (0, "", True)


@pytest.mark.model
def test_the_starter_pair(doctor: Terminal, starter_draft: Path) -> None:
    code, out, _ = doctor("--pair starter --threads 1")
    assert code == 0
    assert "ok      pair: starter" in out
    assert str(starter_draft) in out
