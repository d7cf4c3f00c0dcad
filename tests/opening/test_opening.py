"""Mode auto over tiny real models: what a calibration decides, who makes it, and what is used where a draft is not."""

from __future__ import annotations

import json
import logging
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import llama_cpp
import pytest

from edgespec import calibration
from edgespec.calibration import Calibration
from edgespec.core.policy import Fixed, Goodput
from edgespec.devices.profile import Speculation, read_profile
from edgespec.devices.threads import Threads
from edgespec.drafters.onnx import OnnxDrafter
from edgespec.errors import VocabularyMismatchError
from edgespec.loading import load
from edgespec.pairs import Pair
from edgespec.runtime import Mode
from tests.cli.terminal import run_command
from tests.opening.pairs import CPU, CURVES, keep, key_of, open_auto, params
from tests.test_loading import assert_no_owner_is_left, llama_verifier, onnx_drafter
from tests.test_loading_profile import pair_made_for

GREEDY = params(max_tokens=12)


# What is known decides


def test_a_draft_model_that_does_not_pay_makes_way_for_lookup(
    tiny_gguf: Path, own_folder: Path, no_measuring: None, no_model: None
) -> None:
    keep(key_of(tiny_gguf, own_folder), "plain", gain=0.8)
    with open_auto(tiny_gguf, own_folder) as runtime:
        assert (runtime.draft_name, runtime.mode, runtime.placement) == ("lookup", "sequential", "lookup (CPU)")
        (step,) = runtime.degraded.as_list()
        assert (step["from"], step["to"]) == ("one device", "lookup")
        assert step["reason"].startswith("by calibration the draft model makes 0.80 of the speed")
        assert runtime._service.costs.curves == replace(CURVES, batches=(), step_s=(), overlap=None, read_s=None)
        assert runtime.generate("the", GREEDY).stats.speedup > 0
    assert_no_owner_is_left()


def test_json_tells_why(
    tiny_gguf: Path,
    own_folder: Path,
    tmp_path: Path,
    no_measuring: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "box.toml"
    path.write_text("[verifier]\ngpu_layers = 0\n")
    keep(key_of(tiny_gguf, own_folder, read_profile(path)), "plain", gain=0.8)
    models = ("--verifier", tiny_gguf, "--draft", own_folder, "--profile", path, "--threads", "1")
    line = ("run", "the", *models, "--max-tokens", "3", "--temperature", "0", "--json")
    code, out, err = run_command(monkeypatch, capsys, *line)
    content = json.loads(out)
    (step,) = content["degraded"]
    assert (code, content["placement"], content["mode"]) == (0, "lookup (CPU)", "sequential")
    assert (step["from"], step["to"]) == ("one device", "lookup")
    assert err == f"edgespec: lookup instead of one device: {step['reason']}\n"


@pytest.mark.parametrize(
    ("mode", "threads"),
    [
        ("sequential", Threads(3, 2)),
        ("overlapped", Threads(2, 3, spin=False, together=True)),
    ],
)
def test_the_mode_that_pays_runs_with_its_threads(
    tiny_gguf: Path, own_folder: Path, no_measuring: None, mode: Mode, threads: Threads
) -> None:
    keep(key_of(tiny_gguf, own_folder), mode, threads)
    with open_auto(tiny_gguf, own_folder) as runtime:
        assert (runtime.mode, runtime.draft_name, runtime.placement) == (mode, own_folder.name, "one device")
        assert runtime.policy == Goodput()
        session = onnx_drafter(runtime)._model._session.get_session_options()
        assert llama_cpp.llama_n_threads(llama_verifier(runtime)._context) == threads.verifier
        assert session.intra_op_num_threads == threads.draft
        assert session.get_session_config_entry("session.intra_op.allow_spinning") == str(int(threads.spin))
        assert runtime._service.costs.curves == CURVES
        assert runtime.degraded.steps == ()


def test_a_mode_that_is_asked_for_runs_whatever_pays(tiny_gguf: Path, own_folder: Path, no_measuring: None) -> None:
    keep(key_of(tiny_gguf, own_folder), "plain", Threads(3, 3), gain=0.8)
    with open_auto(tiny_gguf, own_folder, mode="overlapped") as runtime:
        assert (runtime.mode, runtime.draft_name) == ("overlapped", own_folder.name)
        assert llama_cpp.llama_n_threads(llama_verifier(runtime)._context) == 1
        assert runtime._service.costs.curves == CURVES
        assert runtime.degraded.steps == ()


def test_what_is_known_of_other_options_is_not_used(tiny_gguf: Path, own_folder: Path) -> None:
    keep(key_of(tiny_gguf, own_folder), "overlapped")
    others: list[dict[str, Any]] = [{"num_slots": 2}, {"profile": replace(CPU, speculation=Speculation(mode="auto"))}]
    with open_auto(tiny_gguf, own_folder, **others[0]) as runtime:
        assert runtime._service.costs.curves != CURVES
    with open_auto(tiny_gguf, own_folder, **others[1]) as runtime:
        assert runtime._service.costs.curves == CURVES  # the same profile, spelt out


# Who measures


@pytest.mark.parametrize("kind", ["model", "lookup"])
def test_a_first_load_measures_and_the_next_one_knows(
    tiny_gguf: Path, own_folder: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    draft: Path | str = own_folder if kind == "model" else "lookup"
    with open_auto(tiny_gguf, draft) as runtime:
        first = (runtime.mode, runtime.draft_name, runtime.placement)
        assert runtime._service.is_measured
        assert len(runtime.degraded.steps) == (runtime.draft_name != Path(draft).name)
    found = calibration.load(key_of(tiny_gguf, draft))
    assert found is not None
    assert found.is_quick
    assert bool(found.curves.step_s) == (kind == "model")
    assert len(list((own_cache / "calibration").iterdir())) == 1

    monkeypatch.setattr(calibration, "quick", lambda *_, **__: pytest.fail("measured again"))
    with open_auto(tiny_gguf, draft) as runtime:
        assert (runtime.mode, runtime.draft_name, runtime.placement) == first
        assert len(runtime.degraded.steps) == (runtime.draft_name != Path(draft).name)


@pytest.fixture
def no_gain(monkeypatch: pytest.MonkeyPatch) -> str:
    """Whatever is measured. The reason that is given."""
    quick, reason = calibration.quick, "drafting would reach 0.50 x plain"

    def measured(*arguments: Any, **options: Any) -> Calibration:
        return replace(quick(*arguments, **options), mode="plain", reason=reason)

    monkeypatch.setattr(calibration, "quick", measured)
    return reason


def test_a_model_that_is_found_not_to_pay_is_closed_at_once(
    tiny_gguf: Path, own_folder: Path, no_gain: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[OnnxDrafter] = []
    close = OnnxDrafter.close

    def noted(self: OnnxDrafter) -> None:
        closed.append(self)
        close(self)

    monkeypatch.setattr(OnnxDrafter, "close", noted)
    with open_auto(tiny_gguf, own_folder) as runtime:
        assert (runtime.draft_name, runtime.mode, runtime.placement) == ("lookup", "sequential", "lookup (CPU)")
        assert runtime.degraded.as_list() == [{"from": "one device", "to": "lookup", "reason": no_gain}]
        assert runtime.generate("the the the the", GREEDY).stats.completion_tokens == 12
        assert len(closed) == 1
    assert_no_owner_is_left()


@pytest.mark.usefixtures("no_gain")
def test_lookup_costs_nothing_and_stays(tiny_gguf: Path) -> None:
    with open_auto(tiny_gguf, "lookup") as runtime:
        assert (runtime.draft_name, runtime.mode) == ("lookup", "sequential")
        assert runtime.degraded.steps == ()


@pytest.mark.parametrize("content", ["{", "", "[]", "{}", '{"format": 1}', "\0" * 100])
def test_a_calibration_that_is_none_is_told_and_measured_anew(
    tiny_gguf: Path, own_folder: Path, caplog: pytest.LogCaptureFixture, content: str
) -> None:
    key = key_of(tiny_gguf, own_folder)
    key.path.parent.mkdir(parents=True)
    key.path.write_text(content)
    with caplog.at_level(logging.WARNING, "edgespec"), open_auto(tiny_gguf, own_folder) as runtime:
        assert runtime._service.is_measured
    told = [record.getMessage() for record in caplog.records if "measured anew" in record.getMessage()]
    assert len(told) == 1
    assert str(key.path) in told[0]
    assert calibration.load(key) is not None


@pytest.mark.parametrize(
    ("draft", "options"),
    [
        ("none", {}),
        ("none", {"mode": "plain"}),
        ("model", {"mode": "plain"}),
        ("none", {"profile": replace(CPU, speculation=Speculation(mode="plain"))}),
    ],
)
def test_plain_loads_no_draft_model_and_measures_nothing(
    tiny_gguf: Path, own_folder: Path, no_measuring: None, no_model: None, draft: str, options: dict[str, Any]
) -> None:
    with open_auto(tiny_gguf, own_folder if draft == "model" else draft, **options) as runtime:
        assert (runtime.draft_name, runtime.mode, runtime.placement) == ("none", "plain", "plain (CPU)")
        assert runtime.degraded.steps == ()
        assert runtime.generate("the", GREEDY).stats.speedup == 0.0
    assert_no_owner_is_left()


@pytest.mark.parametrize("mode", ["sequential", "overlapped"])
def test_a_fixed_policy_in_a_mode_that_is_asked_for_needs_no_measurement(
    tiny_gguf: Path, own_folder: Path, no_measuring: None, mode: Mode
) -> None:
    with open_auto(tiny_gguf, own_folder, mode=mode, policy=Fixed(3)) as runtime:
        assert (runtime.mode, runtime.draft_name) == (mode, own_folder.name)


def test_a_cache_that_cannot_be_written_only_costs_the_next_measurement(
    tiny_gguf: Path, own_folder: Path, own_cache: Path
) -> None:
    own_cache.write_text("a file where the folder should be")
    for _ in range(2):
        with open_auto(tiny_gguf, own_folder) as runtime:
            assert runtime._service.is_measured
            assert runtime.generate("the", GREEDY).stats.completion_tokens == 12


def test_plain_builds_no_draft_model(foreign_pair: str, no_measuring: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pair, "ensure_draft", lambda *_: pytest.fail("a draft model was built"))
    with load(foreign_pair, num_threads=1, mode="plain") as runtime:
        assert (runtime.draft_name, runtime.mode) == ("none", "plain")


# A draft model that cannot be used


@pytest.fixture
def foreign_pair(tiny_gguf: Path, own_folder: Path, tmp_path: Path) -> str:
    """A pair whose draft model has another token than the verifier."""
    draft = shutil.copytree(own_folder, tmp_path / "foreign")
    tokens = draft / "tokens.json"
    tokens.write_text(tokens.read_text(encoding="utf-8").replace("the", "eth"), encoding="utf-8")
    (tmp_path / "cpu.toml").write_text("[verifier]\ngpu_layers = 0\n")
    return pair_made_for(str(tmp_path / "cpu.toml"), tmp_path / "pair", tiny_gguf, draft)


def test_a_pairs_draft_of_another_vocabulary_makes_way_for_lookup(
    foreign_pair: str, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is measured then is lookup, and is not kept as the model's: the reason stays the same."""
    for _ in range(2):
        with load(foreign_pair, num_threads=1) as runtime:
            assert (runtime.draft_name, runtime.mode, runtime.placement) == ("lookup", "sequential", "lookup (CPU)")
            (step,) = runtime.degraded.as_list()
            assert (step["from"], step["to"]) == ("one device", "lookup")
            assert "eth" in step["reason"]
            assert runtime._service.is_measured
        (kept,) = (own_cache / "calibration").iterdir()
        assert json.loads(kept.read_text())["key"]["draft"] == "lookup"
        monkeypatch.setattr(calibration, "quick", lambda *_, **__: pytest.fail("measured again"))
    assert_no_owner_is_left()


@pytest.mark.parametrize("named", [{"mode": "sequential"}, {"draft": "named"}])
def test_a_draft_that_is_asked_for_must_be_usable(foreign_pair: str, named: dict[str, Any]) -> None:
    draft = {"draft": Path(foreign_pair) / "draft"} if "draft" in named else {}
    with pytest.raises(VocabularyMismatchError, match="eth"):
        load(foreign_pair, num_threads=1, **named | draft)
    assert_no_owner_is_left()
