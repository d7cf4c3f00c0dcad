"""``load`` with a profile, over tiny real models: what reaches llama.cpp and ONNX Runtime, and what wins."""

from __future__ import annotations

import hashlib
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import llama_cpp
import onnxruntime
import pytest

from edgespec import loading, opening, survey
from edgespec.calibration import measuring
from edgespec.core.policy import DEFAULT_POLICY, Fixed, Goodput, Policy, Threshold
from edgespec.devices.profile import Draft, Profile, Serving, Speculation, Verifier, as_toml
from edgespec.drafters import onnx_providers, onnx_session
from edgespec.errors import MissingDependencyError, ParameterError, ProfileError
from edgespec.loading import MIN_CONFIDENCE, NO_PROFILE, choose_profile, load, profiled_policy, resolve
from edgespec.runtime import Runtime
from edgespec.verifiers.canary import MODEL
from edgespec.verifiers.llama import LlamaOptions, LlamaVerifier
from tests.devices.boxes import LAPTOP, workstation
from tests.test_loading import llama_verifier, onnx_drafter

DEVICE = Profile(
    "device",
    draft=Draft(threads=1),
    verifier=Verifier(gpu_layers=0, threads=2, flash_attention="on", split_mode="none"),
    speculation=Speculation(num_candidates=3, mode="sequential", policy="fixed"),
    serving=Serving(context=99),
)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is measured matters to no test here."""
    monkeypatch.setattr(measuring, "QUICK_S", 0.05)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[LlamaOptions]:
    """What verifiers were made with."""
    seen: list[LlamaOptions] = []
    original = LlamaVerifier.__init__

    def spy(self: LlamaVerifier, options: LlamaOptions) -> None:
        seen.append(options)
        original(self, options)

    monkeypatch.setattr(LlamaVerifier, "__init__", spy)
    return seen


def threads(runtime: Runtime) -> tuple[int, int]:
    """Of the verifier and of the draft model."""
    session = onnx_drafter(runtime)._model._session.get_session_options()
    return llama_cpp.llama_n_threads(llama_verifier(runtime)._context), session.intra_op_num_threads


def test_a_profile_by_path_reaches_both_sides(
    tiny_gguf: Path, own_folder: Path, asked: list[LlamaOptions], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "usable_cpus", lambda: 8)
    path = tmp_path / "device.toml"
    path.write_text(as_toml(DEVICE), encoding="utf-8")
    with load(verifier=tiny_gguf, draft=own_folder, profile=str(path)) as runtime:
        assert threads(runtime) == (2, 1)
        assert (runtime.num_ctx, runtime.mode) == (99, "sequential")
        assert runtime.policy == Fixed(3, MIN_CONFIDENCE)
    (options,) = asked
    assert (options.num_gpu_layers, options.flash_attention, options.split_mode) == (0, True, "none")


def test_a_profile_takes_no_more_threads_than_there_are_cpus(
    tiny_gguf: Path, own_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "usable_cpus", lambda: 1)
    with load(verifier=tiny_gguf, draft=own_folder, profile=DEVICE) as runtime:
        assert threads(runtime) == (1, 1)


def test_what_is_said_wins(tiny_gguf: Path, own_folder: Path) -> None:
    said: dict[str, Any] = {"num_ctx": 80, "num_threads": 1, "mode": "overlapped", "policy": Fixed(5, 0.1)}
    with load(verifier=tiny_gguf, draft=own_folder, profile=DEVICE, **said) as runtime:
        assert threads(runtime) == (1, 1)
        assert (runtime.num_ctx, runtime.mode, runtime.policy) == (80, "overlapped", Fixed(5, 0.1))


def test_without_a_profile_all_is_as_it_was(
    tiny_gguf: Path, own_folder: Path, asked: list[LlamaOptions], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "usable_cpus", lambda: 2)
    monkeypatch.setattr(survey, "look_at_box", lambda _: LAPTOP)
    with load(verifier=tiny_gguf, draft=own_folder, mode="sequential") as runtime:
        assert threads(runtime) == (2, 2)
        assert (runtime.num_ctx, runtime.mode, runtime.policy) == (256, "sequential", DEFAULT_POLICY)
    extra = asked[0].use_extra_bufts
    assert asked == [LlamaOptions(tiny_gguf, 2, num_gpu_layers=0, devices=(), use_extra_bufts=extra)]


def test_every_verifier_key_reaches_its_option(asked: list[LlamaOptions]) -> None:
    """By the canary, whose heads are wide enough for quantized caches. Threads are decided later, with the draft's."""
    chosen = Verifier(
        gpu_layers=5,
        kv_type_k="q8_0",
        kv_type_v="q4_0",
        split_mode="row",
        tensor_split=(2.0, 1.0),
        main_gpu=0,
    )
    options = loading._verifier_options(MODEL, Profile("", verifier=chosen), None, 1)
    LlamaVerifier(options).close()
    assert asked == [
        LlamaOptions(
            MODEL, 1, num_gpu_layers=5, kv_type_k="q8_0", kv_type_v="q4_0", split_mode="row", tensor_split=(2.0, 1.0)
        )
    ]


def test_a_context_beyond_what_the_model_was_trained_on_is_not_taken_from_a_profile(tiny_gguf: Path) -> None:
    with load(verifier=tiny_gguf, draft="none", profile=Profile("", serving=Serving(context=8192))) as runtime:
        assert runtime.num_ctx == 256


@pytest.mark.parametrize(
    ("policy", "num_candidates", "expected"),
    [
        ("goodput", 5, Goodput()),
        ("fixed", 5, Fixed(5, MIN_CONFIDENCE)),
        ("fixed", 0, Fixed(0, MIN_CONFIDENCE)),
        ("threshold", 5, Threshold(5)),
        ("threshold", 0, Threshold(3)),
        ("threshold", 32, Threshold(8)),
    ],
)
def test_a_profile_names_the_policy(policy: str, num_candidates: int, expected: Policy) -> None:
    assert profiled_policy(Profile("", speculation=Speculation(num_candidates, policy=policy))) == expected


@pytest.mark.parametrize(
    ("draft", "mode", "expected"),
    [
        (None, None, "plain"),
        ("none", None, "plain"),
        ("lookup", None, None),
        ("lookup", "plain", "plain"),
        ("lookup", "sequential", "sequential"),
    ],
)
def test_a_draft_that_is_named_is_tried_though_the_profile_says_plain(
    tiny_gguf: Path, draft: str | None, mode: str | None, expected: str | None
) -> None:
    device = replace(DEVICE, speculation=Speculation(mode="plain"))
    assert resolve(None, tiny_gguf, draft, profile=device, mode=mode).mode == expected


def test_profiles_that_are_not_there_or_not_right(tiny_gguf: Path, tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="unknown profile 'nothing'"):
        load(verifier=tiny_gguf, draft="none", profile="nothing")
    (tmp_path / "bad.toml").write_text("[draft]\nbit = 8", encoding="utf-8")
    with pytest.raises(ProfileError, match="did you mean 'bits'"):
        load(verifier=tiny_gguf, draft="none", profile=str(tmp_path / "bad.toml"))


ON_CUDA = Profile("", draft=Draft(provider="cuda"), verifier=Verifier(gpu_layers=0))


@pytest.mark.parametrize(
    ("num_cards", "reason"),
    [
        (0, "ONNX Runtime cannot use CUDA here; install onnxruntime-gpu"),
        (1, r"cannot use the provider 'cuda'.*CPUExecutionProvider; install"),
    ],
)
def test_a_gpu_provider_that_is_not_there_is_named_and_the_cpu_drafts(
    tiny_gguf: Path, own_folder: Path, monkeypatch: pytest.MonkeyPatch, num_cards: int, reason: str
) -> None:
    """Also where a card is there and the library lists CUDA: it shows when it is used."""
    if _has_cuda(own_folder):
        pytest.skip("ONNX Runtime runs on CUDA here")
    monkeypatch.setattr(survey, "look_at_box", lambda _: workstation(num_cards=num_cards))
    monkeypatch.setattr(survey, "providers", lambda: (onnx_providers.CUDA, onnx_providers.CPU))
    with load(verifier=tiny_gguf, draft=own_folder, profile=ON_CUDA, num_threads=1, mode="sequential") as runtime:
        (step,) = runtime.degraded.as_list()
        assert (step["from"], step["to"], runtime.placement) == ("reverse", "one device", "one device")
        assert re.search(reason, step["reason"])
        assert runtime.draft_name == own_folder.name
        assert onnx_drafter(runtime)._model._session.get_providers() == [onnx_providers.CPU]


@pytest.mark.parametrize(("provider", "error"), [("cuda", MissingDependencyError), ("tpu", ParameterError)])
def test_a_library_built_without_the_provider(
    own_folder: Path, monkeypatch: pytest.MonkeyPatch, provider: str, error: type[Exception]
) -> None:
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CPUExecutionProvider"])
    with pytest.raises(error, match=provider):
        onnx_session.open_session(own_folder / "model.onnx", 1, True, provider)


def _has_cuda(folder: Path) -> bool:
    try:
        onnx_session.open_session(folder / "model.onnx", 1, True, "cuda")
    except MissingDependencyError:
        return False
    return True


def pair_made_for(profile: str, folder: Path, verifier: Path, draft: Path) -> str:
    """A pair folder like those of ``edgespec quantize pair``."""
    folder.mkdir()
    shutil.copy(verifier, folder / "verifier.gguf")
    shutil.copytree(draft, folder / "draft")
    hashes = [hashlib.sha256(path.read_bytes()).hexdigest() for path in (verifier, draft / "draft.toml")]
    (folder / "pair.toml").write_text(
        f"""format = 1\nname = "tiny"\ndescription = ""\nlicense = "none"\nprofile = "{profile}"
        [verifier]\npath = "verifier.gguf"\nsize_bytes = {verifier.stat().st_size}\nsha256 = "{hashes[0]}"
        [draft]\npath = "draft"\nsha256 = "{hashes[1]}"
        """
    )
    return str(folder)


def test_a_pair_runs_with_the_profile_it_was_made_for(tiny_gguf: Path, own_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(
        "[serving]\ncontext = 64\n[speculation]\nnum_candidates = 2\npolicy = 'fixed'\n"
    )
    profile = str(tmp_path / "mine.toml")
    pair = pair_made_for(profile, tmp_path / "pair", tiny_gguf, own_folder)
    with load(pair, num_threads=1) as runtime:
        assert (runtime.num_ctx, runtime.policy) == (64, Fixed(2, 0.3))
    with load(pair, num_threads=1, profile="auto") as runtime:
        assert runtime.num_ctx > 64
    assert choose_profile(None, pair).name == choose_profile(profile).name
    assert choose_profile("auto", pair).name == "auto"
    assert choose_profile(None) is choose_profile(None, "starter") is choose_profile(None, None, "v.gguf") is NO_PROFILE


def test_a_pair_of_ones_own_that_is_called_starter_keeps_its_profile(
    tiny_gguf: Path, own_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGESPEC_DATA_DIR", str(tmp_path))
    (tmp_path / "pairs").mkdir()
    pair_made_for("cpu-small", tmp_path / "pairs" / "starter", tiny_gguf, own_folder)
    assert choose_profile(None).name == "cpu-small"


def test_a_pair_made_for_an_unknown_profile_says_so(tiny_gguf: Path, own_folder: Path, tmp_path: Path) -> None:
    pair = pair_made_for("gone", tmp_path / "pair", tiny_gguf, own_folder)
    with pytest.raises(ProfileError, match=r"pair tiny is made for profile gone: .*, or give another one$"):
        load(pair)
