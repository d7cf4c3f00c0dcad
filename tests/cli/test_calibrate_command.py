"""``edgespec calibrate`` over tiny real models."""

from __future__ import annotations

import collections.abc as abc
import json
import shutil
from pathlib import Path

import pytest

from edgespec import opening
from edgespec.calibration import measuring
from edgespec.cli import main as entry
from edgespec.cli.calibrate import _text
from tests.calibration.test_calibration_file import FOUND
from tests.cli.terminal import Command, Result, only_error, run_command


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A cache of the test's own, and a quiet box; tiny models need no time."""
    monkeypatch.setenv("EDGESPEC_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setitem(entry.COMMANDS, "calibrate", ("edgespec.cli.calibrate", "calibrate", ""))
    monkeypatch.setattr(measuring, "busy_cpus", lambda: 0.0)
    monkeypatch.setattr(opening, "use_extra_bufts", lambda _: True)
    for name in ("STEP_S", "TURNS_S", "TRY_S", "TOGETHER_S"):
        monkeypatch.setattr(measuring, name, 0.1)
    return tmp_path / "cache"


@pytest.fixture
def calibrate(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    def run(*arguments: str | Path) -> Result:
        return run_command(monkeypatch, capsys, "calibrate", *arguments)

    return run


@pytest.fixture
def pair(tiny_gguf: Path, own_folder: Path) -> abc.Sequence[str | Path]:
    """One thread a side: on a busy box more would wait for each other."""
    return ("--verifier", tiny_gguf, "--draft", own_folder, "--threads", "1")


def test_a_table_and_where_it_is_kept(calibrate: Command, pair: abc.Sequence[str], quiet: Path) -> None:
    code, out, err = calibrate(*pair)
    assert code == 0
    lines = out.splitlines()
    assert lines[0].split()[:3] == ["verify,", "ms", "1"]
    assert lines[1].startswith("after ")
    assert lines[2].split()[:2] == ["1.00", "x"]
    assert {line.split()[0] for line in lines if line} >= {"draft", "threads", "plain", "mode", "measured"}
    (kept,) = (quiet / "calibration").iterdir()
    assert err.splitlines()[-1] == f"kept in {kept}"
    assert "calibrate: load the verifier" in err


def test_what_is_known_is_shown_and_force_measures_anew(calibrate: Command, pair: abc.Sequence[str]) -> None:
    first = json.loads(calibrate(*pair, "--json")[1])
    assert (first["is_new"], first["is_quick"]) == (True, False)
    again = json.loads(calibrate(*pair, "--json")[1])
    assert again == first | {"is_new": False}
    assert calibrate(*pair)[2].splitlines()[-1].endswith("; --force measures anew")
    forced = json.loads(calibrate(*pair, "--json", "--force")[1])
    assert forced["is_new"]
    assert forced["curves"] != first["curves"]
    assert forced["path"] == first["path"]


def test_other_options_are_another_calibration(calibrate: Command, pair: abc.Sequence[str], tiny_gguf: Path) -> None:
    others = [pair[:4], ("--verifier", tiny_gguf, "--threads", "1"), (*pair, "--profile", "cpu-small")]
    paths = {json.loads(calibrate(*arguments, "--json")[1])["path"] for arguments in (pair, *others)}
    assert len(paths) == 4


def test_json_is_all_there_is(calibrate: Command, pair: abc.Sequence[str]) -> None:
    code, out, _ = calibrate(*pair, "--json")
    assert code == 0
    content = json.loads(out)
    assert set(content) == {*FOUND.as_dict(), "path", "is_new"}
    assert content["curves"]["widths"][0] == 1


def test_a_cache_that_cannot_be_written_is_told(calibrate: Command, pair: abc.Sequence[str], quiet: Path) -> None:
    quiet.write_text("a file where the folder should be")
    code, out, err = calibrate(*pair)
    assert code == 0
    assert "mode" in out
    assert "cannot be written" in err.splitlines()[-1]


def test_a_calibration_that_is_not_one_is_measured_anew(
    calibrate: Command, pair: abc.Sequence[str], quiet: Path
) -> None:
    calibrate(*pair)
    (kept,) = (quiet / "calibration").iterdir()
    kept.write_text("{")
    code, _, err = calibrate(*pair)
    assert code == 0
    assert sum("measured anew" in line for line in err.splitlines()) == 1
    assert json.loads(kept.read_text())["format"] == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--pair", "no-such-pair"), "no-such-pair"),
        (("--verifier", "missing.gguf"), "missing.gguf"),
        (("--verifier", ""), "GGUF"),
        (("--profile", "no-such-profile"), "no-such-profile"),
        (("--threads", "0"), "--threads"),
        (("--threads", "-3"), "--threads"),
        (("--rpc", "nonsense"), "nonsense"),
        (("--context", "0"), "context"),
        (("--draft", "missing.onnx"), "missing.onnx"),
        (("--draft", ""), "draft"),
    ],
)
def test_bad_input_is_one_line(
    calibrate: Command, tiny_gguf: Path, arguments: tuple[str, str], words: str, quiet: Path
) -> None:
    alone = ("--verifier", str(tiny_gguf)) if arguments[0] in ("--threads", "--context", "--draft", "--rpc") else ()
    assert words in only_error(calibrate(*alone, *arguments))
    assert not (quiet / "calibration").exists()


def test_a_draft_of_another_vocabulary_is_one_line(
    calibrate: Command, tiny_gguf: Path, own_folder: Path, tmp_path: Path
) -> None:
    draft = shutil.copytree(own_folder, tmp_path / "draft")
    (draft / "tokens.json").write_text((draft / "tokens.json").read_text().replace("the", "eth"))
    assert "token" in only_error(calibrate("--verifier", tiny_gguf, "--draft", draft))


def test_tiny_contexts_are_measured(calibrate: Command, pair: abc.Sequence[str]) -> None:
    for num_ctx in (1, 2, 9):
        content = json.loads(calibrate(*pair, "--context", str(num_ctx), "--json", "--force")[1])
        assert content["curves"]["widths"][0] == 1


def test_the_text_lines_up() -> None:
    lines = list(_text(FOUND))
    assert lines[:5] == [
        "verify, ms       1       2       8",
        "after 64        10      20      30",
        "            1.00 x  2.00 x  3.00 x",
        "after 512       20      30      50",
        "            1.00 x  1.50 x  2.50 x",
    ]
    assert lines[6:] == [
        "draft               5 ms a token",
        "draft, 2 sequences  6 ms a token",
        "both at once        verify 1.20 x, draft 1.10 x",
        "accepted            1 of 2 drafted tokens of usual answers",
        "threads             verifier 1, draft 1, at the same time",
        "plain               10 ms a token",
        "mode                overlapped: it pays",
        "measured            2026-11-30T12:00:00+00:00",
    ]


def test_help_tells_what_it_is_for(calibrate: Command) -> None:
    code, out, _ = calibrate("--help")
    assert code == 0
    assert "which mode pays" in out
