"""Profiles: every key explained, every mistake named, the user's own first."""

from __future__ import annotations

import os
import random
import re
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from edgespec.core import policy
from edgespec.devices import profile as profiles
from edgespec.devices.profile import (
    SECTIONS,
    Device,
    Draft,
    Profile,
    Serving,
    Speculation,
    Verifier,
    as_dict,
    as_toml,
    load_profile,
    profile_files,
    profile_names,
    read_profile,
)
from edgespec.errors import ParameterError, ProfileError
from edgespec.paths import data_dir
from edgespec.runtime import MODES
from edgespec.verifiers import llama_options, llama_rpc
from edgespec.verifiers.llama_options import LlamaOptions
from edgespec.verifiers.llama_rpc import parse_endpoints
from quantize.verifier import TYPES

SHIPPED = {
    "auto", "cpu-small", "dual-gpu", "jetson-agx-orin-64gb", "jetson-orin-nano-8gb", "raspberry-pi-5",
    "workstation-24gb", "workstation-8gb",
}  # fmt: skip
README = (data_dir("device_profiles") / "README.md").read_text(encoding="utf-8")


@pytest.fixture(autouse=True)
def user_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EDGESPEC_CONFIG_DIR", str(tmp_path / "config"))
    folder = tmp_path / "config" / "profiles"
    folder.mkdir(parents=True)
    return folder


# What ships


def test_the_shipped_profiles_load() -> None:
    assert set(profile_names()) == SHIPPED
    for name in SHIPPED:
        profile = load_profile(name)
        assert profile.name == name
        assert profile.device.description


def test_auto_changes_nothing_but_its_description() -> None:
    auto = load_profile("auto")
    assert replace(auto, device=Device()) == Profile("auto")


def explained() -> dict[str, dict[str, list[str]]]:
    """The README's tables: cells by section and key."""
    found: dict[str, dict[str, list[str]]] = {}
    for line in README.splitlines():
        if heading := re.fullmatch(r"### \[(\w+)\]", line):
            found[heading[1]] = {}
        elif row := re.match(r"\| `(\w+)` \| (.*) \|$", line):
            cells = [cell.strip() for cell in row[2].split(" | ")]
            assert row[1] not in found[list(found)[-1]]
            found[list(found)[-1]][row[1]] = cells
    return found


def test_the_readme_explains_every_key_and_no_other() -> None:
    keys = {name: [key.name for key in fields(section)] for name, section in SECTIONS.items()}
    assert {name: list(rows) for name, rows in explained().items()} == keys


def written(value: Any) -> str:
    """A value as a profile file has it."""
    return tomli_w.dumps({"key": value}).removeprefix("key = ").strip()


def test_the_readme_has_every_default_and_every_allowed_value() -> None:
    for name, rows in explained().items():
        for key in fields(SECTIONS[name]):
            default, allowed, used_by, meaning = rows[key.name]
            assert default == f"`{written(key.default)}`", key.name
            assert used_by, key.name
            assert meaning, key.name
            values = key.metadata.get("allowed", ())
            if key.name not in ("gguf_type", "kv_type_v"):
                assert [value for value in values if str(value) not in allowed.split(", ")] == [], key.name


# One fact, one place: where two parts of the project may not import each other, a test holds them together


def test_the_defaults_are_what_happens_without_a_profile() -> None:
    none, options = Profile(""), LlamaOptions(Path(), 1)
    assert getattr(policy, none.speculation.policy.capitalize()) is type(policy.DEFAULT_POLICY)
    assert none.speculation.mode == "auto"
    assert none.serving.context == options.max_ctx == llama_options.NUM_CTX
    assert none.verifier.gpu_layers == options.num_gpu_layers
    for key in ("kv_type_k", "kv_type_v", "split_mode", "tensor_split", "main_gpu"):
        assert getattr(none.verifier, key) == getattr(options, key)


def allowed(section: type[Any], name: str) -> Any:
    (key,) = [key for key in fields(section) if key.name == name]
    return key.metadata.get("allowed", key.metadata.get("high"))


def test_what_is_allowed_is_what_the_parts_can_do() -> None:
    assert allowed(Speculation, "num_candidates") == policy.MAX_DRAFT_LENGTH
    assert all(hasattr(policy, name.capitalize()) for name in allowed(Speculation, "policy"))
    assert set(allowed(Speculation, "mode")) == {"auto", *MODES}
    assert allowed(Verifier, "kv_type_k") == allowed(Verifier, "kv_type_v") == tuple(llama_options.KV_TYPES)
    assert profiles.PLAIN_KV_TYPES == llama_options.PLAIN_KV_TYPES
    assert allowed(Verifier, "split_mode") == tuple(llama_options.SPLIT_MODES)
    assert profiles.MAX_GPUS == llama_options.MAX_GPUS
    assert set(allowed(Verifier, "gguf_type")) == set(TYPES)


@pytest.mark.parametrize(
    "text",
    ["box:50052", "127.0.0.1:1", "a-b.c_d:65535", "", "box", "box:", ":1", "box:0", "box:65536", "box:99999", "box:x",
     "[::1]:50052", "a b:1", "box:1\n", "box:1 ", "http://box:1", "bö:1", "box:１"],
)  # fmt: skip
def test_a_worker_is_what_llama_cpps_rpc_takes(text: str) -> None:
    def taken(check: Callable[[], object], error: type[Exception]) -> bool:
        try:
            check()
        except error:
            return False
        return True

    is_worker = taken(lambda: parse_endpoints([text]), ParameterError)
    assert taken(lambda: Verifier(rpc=(text,)), ProfileError) == is_worker
    assert is_worker == (text in ("box:50052", "127.0.0.1:1", "a-b.c_d:65535"))


def test_at_most_as_many_workers_as_llama_cpp_takes() -> None:
    workers = tuple(f"box:{port}" for port in range(1, llama_rpc.MAX_WORKERS + 2))
    assert Verifier(rpc=workers[:-1]).rpc == workers[:-1]
    with pytest.raises(ProfileError, match=r"rpc: got .*at most 16"):
        Verifier(rpc=workers)


# Where profiles come from


def test_the_users_profile_wins_and_is_marked(user_folder: Path) -> None:
    (user_folder / "auto.toml").write_text("[draft]\nthreads = 3\n", encoding="utf-8")
    (user_folder / "mine.toml").write_text("", encoding="utf-8")
    assert load_profile("auto").draft.threads == 3
    assert load_profile("mine") == Profile("mine")
    marks = {file.name: (file.is_user, file.replaces, file.path.parent) for file in profile_files()}
    assert marks["auto"] == (True, True, user_folder)
    assert marks["mine"] == (True, False, user_folder)
    assert marks["cpu-small"] == (False, False, data_dir("device_profiles"))
    assert set(marks) == {*SHIPPED, "mine"}


def test_hidden_files_are_no_profiles(user_folder: Path) -> None:
    """Such as what editors leave."""
    for name in (".auto.toml", ".toml"):
        (user_folder / name).write_text("[", encoding="utf-8")
    (user_folder / ".#auto.toml").symlink_to("someone@somewhere.1234")
    assert all(not file.is_user for file in profile_files())


def test_a_path_is_no_name(user_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (user_folder / "auto.toml").write_text("[draft]\nthreads = 3\n", encoding="utf-8")
    (tmp_path / "auto.toml").write_text("[draft]\nthreads = 4\n", encoding="utf-8")
    (tmp_path / "box").write_text("[draft]\nthreads = 5\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert load_profile("auto.toml").draft.threads == 4
    assert load_profile(str(tmp_path / "box")) == Profile("box", draft=Draft(threads=5))
    with pytest.raises(ProfileError, match="unknown profile 'box'"):
        load_profile("box")


def test_without_a_user_folder_there_are_the_shipped_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for place in (tmp_path / "nowhere", tmp_path / "file"):
        (tmp_path / "file").touch()
        monkeypatch.setenv("EDGESPEC_CONFIG_DIR", str(place))
        assert set(profile_names()) == SHIPPED


def test_a_user_folder_that_cannot_be_looked_into(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGESPEC_CONFIG_DIR", "x" * 5000)
    with pytest.raises(ProfileError, match=r"cannot look into .*EDGESPEC_CONFIG_DIR"):
        profile_names()


def refused(text: str | bytes, folder: Path) -> str:
    path = folder / "bad.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ProfileError) as caught:
        read_profile(path)
    message = str(caught.value)
    assert str(path) in message
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[draft]\nthread = 2", "[draft]: unknown key 'thread'; did you mean 'threads'?"),
        ("[draft]\nThreads = 2", "[draft]: unknown key 'Threads'; did you mean 'threads'?"),
        ("[verifier]\ncontext = 2", "[verifier]: unknown key 'context'; it belongs into [serving]"),
        ("[serving]\nthreads = 2", "[serving]: unknown key 'threads'; it belongs into [draft] or [verifier]"),
        ("[draft]\nzzz = 2", "[draft]: unknown key 'zzz'; allowed: provider, threads, bits, block_size, head_vocab"),
        ("[drafts]\nbits = 8", "unknown key or section 'drafts'; did you mean 'draft'?"),
        ("bits = 8", "unknown key or section 'bits'; it belongs into [draft]"),
        (f"[draft]\n{'k' * 5000} = 2", "[draft]: unknown key 'kkkkkkkkkkkk...kkkkkkkkkkkkk'; allowed: provider"),
        ("[draft.more]\nbits = 8", "[draft]: unknown key 'more'"),
        ("draft = 8", "[draft]: got 8; allowed: a table of keys"),
        ("[[draft]]\nbits = 8", "[draft]: got [{'bits': 8}]; allowed: a table of keys"),
        ("[draft]\nbits = 5", "[draft] bits: got 5; allowed: 4, 8"),
        ("[draft]\nbits = 8.0", "[draft] bits: got 8.0; allowed: 4, 8"),
        ("[draft]\nbits = '8'", "[draft] bits: got '8'; allowed: 4, 8"),
        ("[draft]\nthreads = true", "[draft] threads: got True; allowed: a whole number from 0 to 1024"),
        ("[draft]\nthreads = -1", "[draft] threads: got -1; allowed: a whole number from 0 to 1024"),
        ("[draft]\nthreads = 1.5", "[draft] threads: got 1.5"),
        ("[draft]\nprovider = 'tpu'", "[draft] provider: got 'tpu'; allowed: cpu, cuda"),
        ("[draft]\nprovider = 2026-01-01", "[draft] provider: got datetime.date(2026, 1, 1); allowed: cpu, cuda"),
        ("[device]\nunified_memory = 1", "[device] unified_memory: got 1; allowed: true or false"),
        ("[device]\nmemory_budget_gib = nan", "memory_budget_gib: got nan; allowed: a number from 0 to 65536"),
        ("[device]\nmemory_budget_gib = inf", "memory_budget_gib: got inf"),
        ("[device]\nmemory_budget_gib = true", "memory_budget_gib: got True"),
        (f"[device]\nmemory_budget_gib = {'9' * 400}", "memory_budget_gib: got 99"),
        ("[device]\ndescription = 3", "[device] description: got 3; allowed: a text"),
        ("[device]\nmachines = 'x'", "[device] machines: got 'x'; allowed: a list of texts"),
        ("[device]\nmachines = ['x', 1]", "[device] machines: got ('x', 1); allowed: a list of texts"),
        ("[device]\nmachines = [' ']", "[device] machines: got an empty text"),
        (
            "[verifier]\ntensor_split = [1, true]",
            "[verifier] tensor_split: got (1.0, True); allowed: a list of numbers",
        ),
        ("[verifier]\ntensor_split = [-1]", "[verifier] tensor_split: got (-1.0,)"),
        ("[verifier]\ntensor_split = [0, 0]", "[verifier] tensor_split: got (0.0, 0.0); allowed: a share for each"),
        (f"[verifier]\ntensor_split = [{'1, ' * 17}]", "at most 16 GPUs"),
        ("[verifier]\ngguf_type = 'q4_k_m'", "[verifier] gguf_type: got 'q4_k_m'; allowed: F32, F16"),
        ("[verifier]\nkv_type_k = 'q2_k'", "[verifier] kv_type_k: got 'q2_k'; allowed: f32, f16, bf16, q8_0"),
        (
            "[verifier]\nkv_type_v = 'q8_0'\nflash_attention = 'off'",
            "[verifier] kv_type_v: got 'q8_0' with flash_attention 'off', which llama.cpp cannot do; "
            "allowed: f32, f16, bf16, or flash_attention 'auto' or 'on'",
        ),
        ("[verifier]\nflash_attention = true", "[verifier] flash_attention: got True; allowed: auto, on, off"),
        ("[speculation]\nmode = 'fast'", "mode: got 'fast'; allowed: auto, plain, sequential, overlapped"),
        ("[speculation]\npolicy = 'best'", "[speculation] policy: got 'best'; allowed: goodput, threshold, fixed"),
        ("[verifier]\nisolate = 1", "[verifier] isolate: got 1; allowed: true or false"),
        ("[verifier]\nrpc = 'box:50052'", "[verifier] rpc: got 'box:50052'; allowed: a list of texts"),
        ("[verifier]\nrpc = ['box']", "[verifier] rpc: got 'box'; allowed: at most 16 different texts like"),
        ("[verifier]\nrpc = ['box:1', 'box:1']", "[verifier] rpc: got ('box:1', 'box:1'); allowed: at most 16"),
        ("[verifier]\nworkers = ['box:1']", "[verifier]: unknown key 'workers'; allowed: gpu_layers, threads"),
        ("[speculation]\nnum_candidates = 33", "[speculation] num_candidates: got 33"),
        ("[serving]\ntarget_batch_size = 2", "[serving] target_batch_size: got 2; allowed: at most max_batch_size (1)"),
        ("[serving]\ncontext = 0", "[serving] context: got 0; allowed: a whole number from 1 to"),
        ("[draft", "is not valid TOML"),
        ("[draft]\nbits = 8\nbits = 8", "is not valid TOML"),
        (b"[draft]\nbits = \xff", "is not valid TOML"),
        ("a = " + "[" * 5000, "is not valid TOML"),
        (b"GGUF" + bytes(2**20), "is larger than 1048576 bytes"),
    ],
)
def test_what_is_wrong_is_named(text: str | bytes, expected: str, tmp_path: Path) -> None:
    assert expected in refused(text, tmp_path)


def test_whole_numbers_and_a_byte_order_mark_are_fine(tmp_path: Path) -> None:
    path = tmp_path / "good.toml"
    path.write_bytes(b"\xef\xbb\xbf[device]\r\nmemory_budget_gib = 5\r\n[verifier]\r\ntensor_split = [3, 1]\r\n")
    profile = read_profile(path)
    assert (profile.device.memory_budget_gib, profile.verifier.tensor_split) == (5.0, (3.0, 1.0))
    assert isinstance(profile.device.memory_budget_gib, float)


@pytest.mark.parametrize(
    ("kv_type", "flash"), [("f16", "off"), ("bf16", "off"), ("q8_0", "auto"), ("q4_0", "on"), ("iq4_nl", "auto")]
)
def test_quantized_values_go_with_flash_attention(kv_type: str, flash: str) -> None:
    assert Verifier(kv_type_v=kv_type, flash_attention=flash).kv_type_v == kv_type
    assert Verifier(kv_type_k="q8_0", flash_attention="off").kv_type_k == "q8_0"


def test_what_is_made_in_python_is_checked_too() -> None:
    with pytest.raises(ProfileError, match="bits: got 5; allowed: 4, 8"):
        Draft(bits=5)
    assert Serving(batch_timeout_ms=3).batch_timeout_ms == 3


@pytest.mark.parametrize("name", ["nothing.toml", "a/b", "\0.toml", "x" * 5000 + ".toml"])
def test_a_file_that_cannot_be_read(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ProfileError, match=r"cannot read the profile .*give the path") as caught:
        load_profile(name)
    assert "\n" not in str(caught.value)


def test_what_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "folder.toml").mkdir()
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe.toml")
    for path in tmp_path.glob("*.toml"):
        with pytest.raises(ProfileError, match="is not a regular file"):
            read_profile(path)


@pytest.mark.parametrize("name", ["", "cpu_small", "AUTO", "..", "auto\n", "\0"])
def test_an_unknown_name_gets_the_known_ones(name: str) -> None:
    with pytest.raises(ProfileError, match=r"unknown profile .*known profiles: auto, cpu-small") as caught:
        load_profile(name)
    assert "\n" not in str(caught.value)
    if name == "cpu_small":
        assert str(caught.value).endswith("did you mean cpu-small?")


# Printed


def test_what_is_printed_reads_as_the_same(tmp_path: Path) -> None:
    ugly = 'quote " backslash \\ tab \t line \n nul \0 del \x7f umlaut ä rocket 🚀'
    profile = Profile(
        "again",
        Device(description=ugly, machines=("a", ugly), memory_budget_gib=1e-5, unified_memory=True),
        verifier=Verifier(tensor_split=(3.0, 0.5)),
    )
    for one in (profile, *(replace(load_profile(name), name="again") for name in SHIPPED)):
        (tmp_path / "again.toml").write_text(as_toml(one), encoding="utf-8", newline="")
        assert read_profile(tmp_path / "again.toml") == one
    keys = {name: set(values) for name, values in as_dict(profile).items() if name != "name"}
    assert keys == {name: {key.name for key in fields(section)} for name, section in SECTIONS.items()}


def test_a_damaged_file_is_read_or_refused_and_nothing_else(tmp_path: Path) -> None:
    rng, text = random.Random(0), as_toml(load_profile("jetson-orin-nano-8gb")).encode()
    messages = []
    for _ in range(300):
        damaged = bytearray(text)
        for _ in range(rng.randint(1, 4)):
            place = rng.randrange(len(damaged))
            damaged[place : place + rng.randint(0, 3)] = bytes(rng.choices(b'[]"=.\n\0\xff x9-e', k=rng.randint(0, 3)))
        path = tmp_path / "damaged.toml"
        path.write_bytes(damaged)
        try:
            read_profile(path)
        except ProfileError as error:
            messages.append(str(error))
    assert len(messages) > 200
    assert [message for message in messages if "\n" in message or str(tmp_path) not in message] == []
