"""What can be checked of the GPU checks without a GPU: the scripts' arguments and plan, the table of speeds."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from quantize import build_draft
from tests.gpu import speed
from tests.tiny import TinyConfig, write_gguf

FOLDER = Path(__file__).parent


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    script, *rest = map(str, arguments)
    return subprocess.run(["bash", str(FOLDER / script), *rest], capture_output=True, text=True, timeout=60)


@pytest.fixture
def carried(tmp_path: Path) -> Path:
    folder = tmp_path / "carried here"
    folder.mkdir()
    (folder / "numpy-1.0-py3-none-any.whl").touch()
    return folder


def test_a_dry_run_prints_every_step_and_runs_none(carried: Path, tmp_path: Path) -> None:
    (tmp_path / "big.gguf").touch()
    done = run("run.sh", "--dry-run", carried, tmp_path / "big.gguf", "lookup")
    assert done.returncode == 0, done.stderr
    for step in ("install what was carried", "build llama-cpp-python", "devices", "tests", "speed", "done"):
        assert f"== {step}" in done.stdout
    assert "-DGGML_CUDA=ON" in done.stdout
    assert "-m pytest -m gpu tests/gpu" in done.stdout
    assert f"+ python3 -m tests.gpu.speed {tmp_path / 'big.gguf'} lookup" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "FOLDER is missing"),
        (("nowhere",), "no folder nowhere"),
        (("--fast", "."), "unknown option --fast"),
        (("--budget",), "needs a number of seconds"),
        (("--budget", "soon", "."), "--budget: got 'soon'"),
        ((".", "one.gguf"), "every GGUF needs its draft"),
        ((".", "one.gguf", "draft"), "no file or folder one.gguf"),
    ],
)
def test_wrong_arguments_are_refused_on_one_line(arguments: tuple[str, ...], says: str) -> None:
    done = run("run.sh", "--dry-run", *arguments)
    assert (done.returncode, done.stdout, says in done.stderr) == (1, "", True), done
    assert len(done.stderr.splitlines()) == 1


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    done = run("run.sh", "--dry-run", tmp_path)
    assert done.returncode == 1
    assert "has no wheels; make it with tests/gpu/carry.sh" in done.stderr


def test_carry_refuses_a_python_that_is_none() -> None:
    assert "PYTHON: got 'three'" in run("carry.sh", "folder", "three").stderr
    assert "usage:" in run("carry.sh").stderr


def test_speed_prints_a_row_a_pair_and_the_costs_by_width(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    verifier = write_gguf(tmp_path / "tiny.gguf", TinyConfig(num_ctx=1024))
    draft = build_draft(verifier, tmp_path / "draft", bits=8)
    assert speed.main([str(verifier), str(draft), "--max-tokens", "6", "--rounds", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[0] for line in lines] == [
        "| verifier", "|---|---|---|---|---|---|---|", "| tiny", "", "| model", "| ---", "| tiny",
    ]  # fmt: skip
    assert len(lines[2].split(" | ")) == len(speed.TITLES)


def test_speed_wants_a_draft_for_every_verifier(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        speed.main(["one.gguf"])
    assert "a draft after every GGUF" in capsys.readouterr().err
    assert speed.main(["nowhere.gguf", "lookup"]) == 3
