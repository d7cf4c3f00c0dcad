"""The doctor over a tiny real pair: healthy, and with a box or models that are not right."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from edgespec.calibration import Calibration, key_of, store
from edgespec.core.costs import FLAT
from edgespec.devices.profile import Device, Draft, Verifier
from edgespec.devices.threads import Threads
from edgespec.doctor import first_problem
from edgespec.errors import (
    BackendError,
    MemoryBudgetError,
    ModelFormatError,
    ModelNotFoundError,
    ParameterError,
    ProfileError,
    UnknownPairError,
    VocabularyMismatchError,
)
from edgespec.loading import resolve
from tests.devices.boxes import gpu, workstation
from tests.doctor.patients import PLENTY, WHATS, look, on_box, only_problem, problems, profile

# Healthy


def test_a_healthy_pair(pair: dict[str, Any]) -> None:
    findings = look(**pair)
    assert [finding.what for finding in findings] == [*WHATS, "calibration"]
    assert first_problem(findings) is None
    notes = {finding.what for finding in findings if finding.status == "note"}
    assert notes <= {"GPU", "placement", "calibration", WHATS[2]}
    assert all(finding.detail and "\n" not in finding.detail + finding.remedy for finding in findings)


@pytest.mark.parametrize("draft", [None, "lookup", "none"])
def test_a_healthy_verifier_without_a_draft_model(tiny_gguf: Path, draft: str | None) -> None:
    findings = look(verifier=tiny_gguf, draft=draft)
    assert [finding.what for finding in findings] == WHATS
    assert first_problem(findings) is None


def test_a_healthy_gpu_box(pair: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    on_box(monkeypatch, workstation(gpu(24)))
    for options in ({}, {"profile": "workstation-24gb", "draft": "lookup", "mode": "plain"}):
        findings = {finding.what: finding for finding in look(**(pair | options))}
        assert findings["GPU"].detail.startswith("CUDA0 (NVIDIA Something), 24.00 GiB of 26.67 GiB free")
        assert findings["placement"].status == "ok"
    wanted = profile(tmp_path / "x.toml", verifier=Verifier(gpu_layers=0))
    assert first_problem(look(**pair, profile=wanted)) is None


@pytest.mark.parametrize(
    ("is_quick", "status", "detail"),
    [(None, "note", "none yet"), (True, "note", "quick one"), (False, "ok", "plain: as measured")],
)
def test_what_rounds_cost_is_known_or_not(
    pair: dict[str, Any],
    is_quick: bool | None,
    status: str,
    detail: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("EDGESPEC_CACHE_DIR", str(tmp_path / "cache"))
    if is_quick is not None:
        order = resolve(None, pair["verifier"], pair["draft"])
        key = key_of(order.options, order.draft, order.profile, PLENTY.devices)
        store(key, Calibration(FLAT, Threads(1, 1), "plain", "as measured", 1.0, 0.01, "", 40.0, is_quick))
    (finding,) = (finding for finding in look(**pair) if finding.what == "calibration")
    assert (finding.status, detail in finding.detail) == (status, True)
    assert (finding.remedy == "better, once: edgespec calibrate") == (status == "note")
    assert not [one for one in look(**pair, mode="plain") if one.what == "calibration"]


def test_a_draft_that_is_not_built_yet(monkeypatch: pytest.MonkeyPatch, starter_gguf: Path, tmp_path: Path) -> None:
    monkeypatch.setenv("EDGESPEC_CACHE_DIR", str(tmp_path))
    findings = {finding.what: finding for finding in look()}
    assert findings["draft model"].status == "note"
    assert "not built yet" in findings["draft model"].detail
    assert first_problem(list(findings.values())) is None
    assert not (tmp_path / "drafts").exists()


# Broken: the box


def test_cards_without_a_gpu_build(pair: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    on_box(monkeypatch, workstation(num_cards=2))
    findings = look(**pair)
    assert problems(findings) == ["GPU", "placement"]
    assert "-DGGML_CUDA=ON" in findings[WHATS.index("GPU")].remedy


def test_a_gpu_profile_without_a_gpu(pair: dict[str, Any]) -> None:
    findings = look(**(pair | {"profile": "dual-gpu", "draft": "lookup", "mode": "plain"}))
    assert findings[WHATS.index("GPU")].remedy == "find yours: edgespec profiles detect"
    assert first_problem(findings) == findings[WHATS.index("GPU")]


def test_too_many_threads(pair: dict[str, Any], tmp_path: Path) -> None:
    assert (
        only_problem(look(**pair, threads=9), "CPUs", ParameterError).detail == "--threads is 9, but only 8 are usable"
    )
    wanted = profile(tmp_path / "x.toml", draft=Draft(threads=9))
    assert only_problem(look(**pair, profile=wanted), "CPUs", ProfileError).remedy.startswith("set it to 0")
    both = profile(tmp_path / "y.toml", draft=Draft(threads=4), verifier=Verifier(threads=5))
    found = look(**pair, profile=both)[WHATS.index("CPUs")]
    assert (found.status, "[verifier] threads 5 and [draft] threads 4" in found.detail) == ("note", True)


def test_a_profile_that_is_not_right(pair: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text("[draft]\nbit = 8", encoding="utf-8")
    findings = look(**pair, profile=str(tmp_path / "bad.toml"))
    only_problem(findings, "profile", ProfileError)
    assert "verifier" in [finding.what for finding in findings]


def test_a_worker_does_not_answer(pair: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert "edgespec worker" in only_problem(look(**pair, rpc=("127.0.0.1:9",)), "workers", BackendError).remedy
    wanted = profile(tmp_path / "x.toml", verifier=Verifier(rpc=("127.0.0.1:9",)))
    only_problem(look(**pair, profile=wanted), "workers", BackendError)
    only_problem(look(**pair, rpc=("here",)), "workers", ParameterError)


# Broken: the models


def test_an_unknown_pair() -> None:
    for name in ("nothing", "", "/dev"):
        findings = look(pair=name)
        problem = next(finding for finding in findings if finding.status == "problem")
        assert (problem.what, problem.error, len(problems(findings))) == ("pair", UnknownPairError, 1)
        assert findings[-1].what == "GPU"  # there is nothing more to look at


@pytest.mark.parametrize("name", ["none.gguf", "x-00001-of-00002.gguf"])
def test_the_verifier_is_missing(pair: dict[str, Any], tmp_path: Path, name: str) -> None:
    only_problem(look(**(pair | {"verifier": tmp_path / name})), "verifier", ModelNotFoundError)


def test_the_verifier_is_no_gguf(pair: dict[str, Any]) -> None:
    only_problem(look(**(pair | {"verifier": Path(__file__)})), "verifier", ModelFormatError)


def test_the_draft_is_missing(pair: dict[str, Any], tmp_path: Path) -> None:
    problem = only_problem(look(**(pair | {"draft": str(tmp_path / "none")})), "draft model", ModelNotFoundError)
    assert problem.remedy == "give a draft folder or an .onnx file, or: lookup, none"


def test_the_draft_speaks_other_tokens(pair: dict[str, Any], own_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(own_folder, tmp_path / "foreign")
    tokens = json.loads((folder / "tokens.json").read_text(encoding="utf-8"))
    (folder / "tokens.json").write_text(json.dumps([*tokens[:50], "foreign", *tokens[51:]]), encoding="utf-8")
    only_problem(look(**(pair | {"draft": str(folder)})), "tokenizer", VocabularyMismatchError)


def test_the_draft_is_damaged(pair: dict[str, Any], own_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(own_folder, tmp_path / "damaged")
    (folder / "model.onnx").write_bytes(b"no model")
    only_problem(look(**(pair | {"draft": str(folder)})), "tokenizer", ModelFormatError)


def test_the_memory_is_too_small(pair: dict[str, Any], tmp_path: Path) -> None:
    wanted = profile(tmp_path / "x.toml", device=Device(memory_budget_gib=0.1))
    findings = look(**pair, profile=wanted)
    assert problems(findings) == ["memory", "placement"]
    first = first_problem(findings)
    assert first is not None
    assert (first.error, "0.10" in first.detail or "102 MiB" in first.detail) == (MemoryBudgetError, True)


def test_the_gpu_is_too_small(pair: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    on_box(monkeypatch, workstation(gpu(0.3)))
    findings = look(**pair)
    assert problems(findings) == ["memory", "placement"]
    assert "one device instead of hybrid" in findings[WHATS.index("placement")].detail


def test_a_cache_that_the_heads_do_not_divide(pair: dict[str, Any], tmp_path: Path) -> None:
    wanted = profile(tmp_path / "x.toml", verifier=Verifier(kv_type_k="q8_0"))
    assert "'f16'" in only_problem(look(**pair, profile=wanted), "context", ProfileError).remedy


def test_a_context_beyond_the_models_is_a_note(pair: dict[str, Any]) -> None:
    found = look(**pair, context=1000)[WHATS.index("context")]
    assert (found.status, "trained on 256" in found.detail) == ("note", True)
