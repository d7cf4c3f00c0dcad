"""What a distillation may be told, what it takes where nothing is said, and how it shares its hours out."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from edgespec.core.sequence import MAX_SEED
from edgespec.errors import ModelFormatError, ParameterError
from quantize.distill import DistillSettings
from quantize.distill.settings import saved_settings, settle
from quantize.distill.spent import Spent


@pytest.fixture
def settings(tmp_path: Path) -> DistillSettings:
    return DistillSettings(tmp_path / "verifier.gguf", tmp_path / "out", tokens=50, epochs=3)


@pytest.mark.parametrize(
    "change",
    [
        {"tokens": 0},
        {"hours": 0.0},
        {"hours": float("inf")},
        {"learning_rate": float("nan")},
        {"seed": -1},
        {"device": "tpu"},
        {"block_size": 16},
        {"hidden_weight": -1.0},
        {"resume": True, "force": True},
        {"epochs": 1e18},
        {"seed": MAX_SEED // 2},  # one more is too much for what measures
        {"batch_size": 10**400},
        {"num_rows": 10**400},
        {"tokens": 10**400},
    ],
)
def test_settings_out_of_range(settings: DistillSettings, change: dict[str, object]) -> None:
    with pytest.raises(ParameterError, match="allowed") as e:
        replace(settings, **change)  # type: ignore[arg-type]
    assert "\n" not in str(e.value)


def test_layers_are_the_first_and_the_last(tmp_path: Path) -> None:
    def kept(layers: int | tuple[int, ...]) -> tuple[int, ...]:
        return DistillSettings(tmp_path, tmp_path, layers=layers).kept_layers(30)

    assert kept(1) == (0,)
    assert kept(4) == (0, 1, 28, 29)
    assert kept(5) == (0, 1, 2, 28, 29)
    assert kept(30) == tuple(range(30))
    assert kept((3, 2)) == (3, 2)
    assert kept((0, 1, 2, 27, 28, 29)) == (0, 1, 2, 27, 28, 29)


def test_bounds_where_none_are_given(tmp_path: Path) -> None:
    plain = DistillSettings(tmp_path, tmp_path)
    assert plain.bounded().hours == 1
    assert replace(plain, tokens=7).bounded() == replace(plain, tokens=7, epochs=4.0)
    assert replace(plain, epochs=2.0).bounded() == replace(plain, tokens=2_000_000, epochs=2.0)
    assert replace(plain, hours=2.0).bounded() == replace(plain, hours=2.0)


def test_hours_are_shared_out(settings: DistillSettings, tmp_path: Path) -> None:
    spent, bounded = Spent(tmp_path / "spent.json"), replace(settings, hours=10.0, tokens=None)
    assert spent.text_left_s(bounded) == pytest.approx(3.5 * 3600)
    spent.text_s = 3 * 3600
    promised = spent.promise(bounded)
    assert promised is not None
    assert 6.5 < promised <= 7
    spent.text_s = 12 * 3600
    assert spent.promise(bounded) == promised  # not less than was promised
    spent.save()
    assert Spent.read(spent.path) == spent
    assert spent.promise(replace(settings, hours=None)) is None


@pytest.mark.parametrize(
    ("name", "value"), [("verifier", 5), ("verifier", None), ("tokens", "many"), ("seed", None), ("learning_rate", -1)]
)
def test_settings_that_nobody_wrote(settings: DistillSettings, name: str, value: object) -> None:
    settle(settings, {})
    path = settings.work / "settings.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), name: value}))
    with pytest.raises(ModelFormatError, match="damaged; begin anew with --force"):
        saved_settings(settings.out, {})


@pytest.mark.parametrize(("begun", "bound"), [("tokens", "hours"), ("hours", "epochs")])
def test_a_bound_that_was_not_there_is_less(settings: DistillSettings, begun: str, bound: str) -> None:
    """And what was begun can be gone on with as it was."""
    nothing = replace(settings, tokens=None, epochs=None)
    settings = replace(nothing, **{begun: 1}).bounded()  # type: ignore[arg-type]
    settle(settings, {})
    with pytest.raises(ParameterError, match=f"^{bound}: got 2, this was begun without") as e:
        settle(replace(settings, **{bound: 2}), {})  # type: ignore[arg-type]
    assert "\n" not in str(e.value)
    assert saved_settings(settings.out, {}) == replace(settings, resume=True, verifier=settings.verifier.absolute())


def test_hours_that_nobody_counted(tmp_path: Path) -> None:
    path = tmp_path / "spent.json"
    path.write_text(json.dumps({"text_s": "x", "written_for": [None], "training_h": None}))
    with pytest.raises(ModelFormatError, match="damaged; delete it"):
        Spent.read(path)
