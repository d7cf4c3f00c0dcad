"""What a distillation leaves to read: text, data and two pictures."""

from __future__ import annotations

import importlib.util
import json
import struct
from dataclasses import replace
from pathlib import Path

import pytest

from edgespec.agreement.drafting_result import TEMPERATURES, Drafting
from edgespec.agreement.matches import LENGTHS, Matches
from edgespec.agreement.plots import plot_loss
from edgespec.agreement.report import ACCEPTANCE, DATA, LOSS, TEXT, Report
from edgespec.core.costs import Curves
from edgespec.errors import FileAccessError, MissingDependencyError
from quantize.distill.history import History, Point

CURVES = Curves((1, 2, 5, 9), (200,), ((0.010, 0.012, 0.020, 0.030),), (1,), (0.001,))
POINTS = tuple(
    Point(step, 1000 * step, 6.0 * step, 1e-3, 4.0 / step, 4.2 / step, 0.5, 0.1 * step) for step in (1, 2, 4)
)


def drafting(name: str, step_s: float = 0.001) -> Drafting:
    qa, rag = Matches(((True, True, False, True),)), Matches(((True, False), (False, False, True)))
    return Drafting(
        draft=Path("/home/somebody/out") / name,
        verifier=Path("/home/somebody/model.gguf"),
        matches={temperature: {"qa": qa, "rag": rag} for temperature in TEMPERATURES},
        num_prompts=3,
        num_left_out=0,
        max_tokens=4,
        seed=1,
        curves=replace(CURVES, step_s=(step_s,)),
        num_threads=2,
        size_bytes=31_400_000,
    )


def report(points: tuple[Point, ...] = POINTS) -> Report:
    settings = {"layers": [0, 1, 2], "seed": 5, "prompts": "own|text", "hours": None}
    draftings = {"int8": drafting("draft-int8", 0.0012), "int4": drafting("draft-int4", 0.0007)}
    return Report(settings, History(points, 4, 90, 8), draftings)


def png_size(path: Path) -> tuple[int, int]:
    content = path.read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", content[16:24])
    return width, height


def test_four_files_and_no_more(tmp_path: Path) -> None:
    report().write(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {TEXT, DATA, LOSS, ACCEPTANCE}
    for name in (LOSS, ACCEPTANCE):
        width, height = png_size(tmp_path / name)
        assert 600 < width < 1600
        assert 300 < height < 900
        assert (tmp_path / name).stat().st_size > 5000


def test_they_are_replaced(tmp_path: Path) -> None:
    report().write(tmp_path)
    before = (tmp_path / LOSS).read_bytes()
    report(POINTS[:2]).write(tmp_path)
    assert (tmp_path / LOSS).read_bytes() != before
    assert len(json.loads((tmp_path / DATA).read_text(encoding="utf-8"))["history"]["points"]) == 2


def test_the_faster_of_equals_is_chosen() -> None:
    assert report().chosen == "int4"
    assert replace(report(), draftings={"int8": drafting("a"), "int4": drafting("b")}).chosen == "int8"


def test_the_text_says_what_was_measured_and_where_from() -> None:
    text = report().text()
    lines = text.splitlines()
    assert lines[0] == "# A draft model for model.gguf"
    assert "| **int4** (in the pair) | 31.4 | 0.70 | 0.556 |" in text
    assert "| int8 | 31.4 | 1.20 | 0.556 |" in text
    assert "| qa | 4 | 0.750 | 0.750 |" in lines
    assert "4 of 4 steps, 0.00 million tokens, 0.01 hours, on 90 texts; 8 others were held out" in text
    assert "| seed | 5 |" in lines
    assert "| prompts | own\\|text |" in lines
    assert "| hours | null |" in lines
    assert f"![Loss]({LOSS})" in lines
    assert "/home/somebody" not in text
    assert max(map(len, lines)) < 250


def test_prompts_that_were_left_out_are_told() -> None:
    one = replace(drafting("a"), num_left_out=2)
    assert "to 3 prompts (2 more were too long);" in replace(report(), draftings={"int8": one}).text()


def test_the_data_is_all_there() -> None:
    content = json.loads(json.dumps(report().as_dict()))
    assert content["chosen"] == "int4"
    assert content["settings"]["layers"] == [0, 1, 2]
    assert History.of(content["history"]).points == POINTS
    cold = content["drafts"]["int8"]["temperatures"]["0"]
    assert cold["by_category"]["qa"] == {"agreement": 0.75, "num_positions": 4}
    assert cold["by_depth"]["1"] == pytest.approx(5 / 9)
    assert [cold["predicted_speedup"][str(length)] for length in LENGTHS] == [
        pytest.approx(report().draftings["int8"].speedup(length)) for length in LENGTHS
    ]
    assert content["drafts"]["int8"]["verify_ms"]["5"] == 20.0


@pytest.mark.parametrize("points", [(), (replace(POINTS[0], step=0, num_tokens=0, loss=None),)])
def test_nothing_trained_yet(points: tuple[Point, ...], tmp_path: Path) -> None:
    report(points).write(tmp_path)
    assert (tmp_path / TEXT).stat().st_size > 1000


def test_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "matplotlib" else find(name))
    with pytest.raises(MissingDependencyError, match="matplotlib"):
        report().write(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("", encoding="utf-8")
    with pytest.raises(FileAccessError, match="cannot be written"):
        report().write(tmp_path / "out")


def test_what_is_no_number_is_valid_json(tmp_path: Path) -> None:
    report((replace(POINTS[0], loss=float("nan"), held_out_loss=float("inf")),)).write(tmp_path)
    point = json.loads((tmp_path / DATA).read_text(encoding="utf-8"), parse_constant=pytest.fail)["history"]["points"][
        0
    ]
    assert (point["loss"], point["held_out_loss"]) == (None, None)


def test_the_data_comes_last(tmp_path: Path) -> None:
    """Where it is, all are."""
    (tmp_path / TEXT).mkdir()
    with pytest.raises(FileAccessError):
        report().write(tmp_path)
    assert not (tmp_path / DATA).exists()


def test_the_picture_says_where_rounding_begins(tmp_path: Path) -> None:
    for name, rounded_from in (("none", None), ("later", 5), ("here", 3)):
        plot_loss(POINTS, tmp_path / name, rounded_from)
    none, later, here = ((tmp_path / name).read_bytes() for name in ("none", "later", "here"))
    assert none == later != here


def test_names_that_a_table_or_a_file_cannot_hold(tmp_path: Path) -> None:
    one = drafting("a")
    odd = {t: {"q|a\n# x": by_category["qa"]} for t, by_category in one.matches.items()}
    named = replace(one, matches=odd, verifier=Path("model\udcff.gguf"))
    replace(report(), draftings={"int8": named}).write(tmp_path)
    text = (tmp_path / TEXT).read_text(encoding="utf-8")
    assert text.startswith("# A draft model for model?.gguf\n")
    assert "| q\\|a # x | 4 |" in text
