"""``edgespec distill`` on a tiny verifier: what it makes, prints and refuses."""

from __future__ import annotations

import collections.abc as abc
import json
import re
from pathlib import Path

import click
import pytest
import torch
from click.testing import CliRunner

from edgespec.agreement import drafting
from edgespec.cli.distill import _bars, _layers
from edgespec.cli.distill import distill as command
from edgespec.pairs import load_pair
from quantize.distill import DistillSettings
from tests.cli.terminal import Command, Result, only_error, run_command

OPTIONS: tuple[str, ...] = (
    *("--layers", "1", "--head-vocab", "200", "--tokens", "50", "--epochs", "2", "--batch-size", "1"),
    *("--max-length", "96", "--rows", "4", "--threads", "1"),
)


@pytest.fixture
def distill(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> abc.Iterator[Command]:
    """Runs ``edgespec distill`` with its arguments."""
    monkeypatch.setattr(drafting, "CURVE_S", 0.1)
    before = torch.get_num_threads()

    def run(*arguments: str | Path) -> Result:
        return run_command(monkeypatch, capsys, "distill", *arguments)

    yield run
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("suite") / "suite.jsonl"
    lines = [{"category": category, "turns": ["what is it"]} for category in ("qa", "writing")]
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    return path


def test_from_a_verifier_to_a_pair(distill: Command, tiny_gguf: Path, suite: Path, tmp_path: Path) -> None:
    out = tmp_path / "my pair"
    common = ("--verifier", tiny_gguf, "--out", out, *OPTIONS, "--suite", suite)
    code, printed, err = distill(*common)
    assert code == 0, err
    assert re.search(
        r"int8.*: \d+\.\d MB, \d+\.\d\d ms a token, agreement 0\.\d{3} at T=0, \d\.\d{3} at T=0.8", printed
    )
    assert printed.count("(in the pair)") == 1
    assert f"edgespec run --pair '{out}'" in err
    assert [f"distill {n}/4" in err for n in (1, 2, 3, 4)] == [True] * 4
    assert re.search(r"^edgespec: layers kept: 0; drafts: int8 about \d\.\d MB, int4 about \d\.\d MB\ndistill 1/4", err)
    assert {"report.md", "report.json", "loss.png", "acceptance.png", "pair.toml"} <= {p.name for p in out.iterdir()}
    pair = load_pair(str(out))
    assert pair.verifier.find().samefile(tiny_gguf)
    assert pair.ensure_draft().parent == out
    report = json.loads((out / "report.json").read_text())
    assert set(report["drafts"]) == {"int8", "int4"}
    assert set(report["drafts"]["int8"]["temperatures"]["0"]["by_category"]) == {"qa", "writing"}
    assert report["settings"]["epochs"] == 2
    rounded_from = report["history"]["rounded_from"]
    assert 0 < rounded_from < report["history"]["num_steps"]
    assert f" From step {rounded_from} on, with weights rounded to 4 bits." in (out / "report.md").read_text()

    changed = (out / "report.json").stat().st_mtime_ns
    code, printed, err = distill("--out", out, "--resume", "--suite", suite, "--json")  # all of it is there
    assert code == 0, err
    assert json.loads(printed)["drafts"] == report["drafts"]
    assert (out / "report.json").stat().st_mtime_ns == changed
    refused = distill(*common)
    assert "exists; go on with it (--resume)" in only_error(refused)
    assert refused[0] == 5
    assert "seed: got 3, this was begun with 0" in only_error(distill("--out", out, "--resume", "--seed", "3"))

    for name, damage in (("report.md", None), ("loss.png", None), ("report.json", report["settings"])):
        (out / name).unlink()
        if damage:
            (out / name).write_text(json.dumps({"settings": damage}))
        code, printed, err = distill("--out", out, "--resume", "--suite", suite)
        assert code == 0, err
        assert json.loads((out / "report.json").read_text())["drafts"].keys() == report["drafts"].keys()
        assert (out / name).is_file()
    other = tmp_path / suite.name
    other.write_text(json.dumps({"category": "other", "turns": ["what is it"]}))
    code, printed, err = distill("--out", out, "--resume", "--suite", other, "--json")  # of the same name
    assert code == 0, err
    assert set(json.loads(printed)["drafts"]["int8"]["temperatures"]["0"]["by_category"]) == {"other"}

    code, printed, err = distill("--out", out, "--resume", "--epochs", "3", "--suite", suite, "--json")
    assert code == 0, err
    content = json.loads(printed)
    assert content["history"]["num_steps"] > report["history"]["num_steps"]
    assert content["settings"]["checkpoint"] != report["settings"]["checkpoint"]
    assert load_pair(str(out)).ensure_draft().parent == out


def test_stopped_while_measuring(
    distill: Command, tiny_gguf: Path, suite: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(drafting, "measure_drafts", stop)
        code, printed, err = distill("--out", out, "--verifier", tiny_gguf, *OPTIONS, "--suite", suite)
    assert code == 130
    assert (printed, "Traceback" in err) == ("", False)
    assert not (out / "pair.toml").exists()
    code, printed, err = distill("--out", out, "--resume", "--suite", suite)
    assert code == 0, err
    assert load_pair(str(out)).ensure_draft().parent == out


def test_without_a_verifier(distill: Command, tmp_path: Path) -> None:
    assert "give --verifier FILE.gguf" in only_error(distill("--out", tmp_path / "out"))
    assert "give --verifier FILE.gguf" in only_error(distill("--out", tmp_path / "out", "--resume"))
    assert "no model file" in only_error(distill("--out", tmp_path / "out", "--verifier", tmp_path / "none.gguf"))
    assert not (tmp_path / "out").exists()


def test_a_suite_is_read_before_anything_is_done(distill: Command, tiny_gguf: Path, tmp_path: Path) -> None:
    (tmp_path / "suite.jsonl").write_text("nonsense")
    common = ("--out", tmp_path / "out", "--verifier", tiny_gguf, *OPTIONS)
    assert "suite.jsonl line 1" in only_error(distill(*common, "--suite", tmp_path / "suite.jsonl"))
    (tmp_path / "suite.jsonl").write_text('{"category": "qa", "turns": ["\\ud800"]}')
    assert "suite.jsonl line 1" in only_error(distill(*common, "--suite", tmp_path / "suite.jsonl"))
    assert "none.jsonl" in only_error(distill(*common, "--suite", tmp_path / "none.jsonl"))
    assert "none.jsonl" in only_error(distill(*common, "--prompts", tmp_path / "none.jsonl"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "wrong",
    [
        ("--layers", "one"),
        ("--layers", "3-1"),
        ("--layers", "0"),
        ("--layers", "7"),
        ("--tokens", "0"),
        ("--hours", "0"),
        ("--hours", "nan"),
        ("--epochs", "-1"),
        ("--learning-rate", "inf"),
        ("--head-vocab", "-1"),
        ("--device", "tpu"),
        ("--block-size", "48"),
        ("--resume", "--force"),
        ("--epochs", "1e18"),
        ("--seed", "9" * 30),
        ("--rows", "9" * 400),
    ],
)
def test_values_that_cannot_be(distill: Command, wrong: tuple[str, str], tiny_gguf: Path, tmp_path: Path) -> None:
    result = distill("--out", tmp_path / "out", "--verifier", tiny_gguf, *OPTIONS, *wrong)
    assert result[0] == 2
    only_error(result)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("4", 4),
        (" 4 ", 4),
        ("0,1,28-29", (0, 1, 28, 29)),
        ("0,1,2,27,28,29", (0, 1, 2, 27, 28, 29)),
        ("3-5", (3, 4, 5)),
        ("7,", None),
    ],
)
def test_layers(text: str, expected: int | tuple[int, ...] | None) -> None:
    if expected is None:
        with pytest.raises(click.BadParameter, match="how many, or which"):
            _layers(None, None, text)  # type: ignore[arg-type]
    else:
        assert _layers(None, None, text) == expected  # type: ignore[arg-type]


def test_help_tells_the_defaults(tmp_path: Path) -> None:
    text = " ".join(CliRunner().invoke(command, ["--help"], terminal_width=200).output.split())
    defaults = DistillSettings(tmp_path, tmp_path)
    names = (
        "layers",
        "head_vocab",
        "batch_size",
        "learning_rate",
        "max_length",
        "hidden_weight",
        "block_size",
        "seed",
        "device",
    )
    for name in names:
        option = re.search(rf"--{name.replace('_', '-')} [A-Z[].*?\[default: (.*?)\]", text)
        assert option is not None, name
        assert option[1] == str(getattr(defaults, name)).removesuffix(".0"), name
    assert f"[default: {defaults.bounded().hours:g}, without" in text


def test_a_bar_for_each_stage(capsys: pytest.CaptureFixture[str]) -> None:
    with _bars() as progress:
        progress("generate", 0.0)
        progress("train", 0.0)
        progress("train: 10.0% agree", 0.5)
        progress("export", 1.0)
    assert capsys.readouterr().err.splitlines() == [
        "distill 1/4: generate",
        "distill 2/4: train",
        "distill 2/4: train: 10.0% agree",
        "distill 3/4: export",
    ]
