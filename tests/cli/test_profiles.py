"""``edgespec profiles``: what is printed where, exit codes, and that nothing heavy is loaded for a list."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from edgespec.devices import probe
from edgespec.devices.profile import Profile, as_toml, load_profile, profile_names, read_profile
from edgespec.errors import MissingDependencyError
from edgespec.verifiers import llama_devices
from edgespec.verifiers.llama_devices import LlamaDevice
from tests.cli.terminal import run_command
from tests.devices import trees

ROOT = Path(__file__).parents[2]


class Terminal:
    def __init__(self, patch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._patch, self._capsys = patch, capsys

    def __call__(self, line: str) -> tuple[int, str, str]:
        return run_command(self._patch, self._capsys, "profiles", *shlex.split(line))


@pytest.fixture
def profiles(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Terminal:
    return Terminal(monkeypatch, capsys)


@pytest.fixture(autouse=True)
def user_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EDGESPEC_CONFIG_DIR", str(tmp_path / "config"))
    folder = tmp_path / "config" / "profiles"
    folder.mkdir(parents=True)
    return folder


@pytest.fixture
def on_a_pi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = trees.plant(tmp_path / "pi", trees.RASPBERRY_PI_5)
    monkeypatch.setattr(probe.probe, "__defaults__", (root, ()))
    monkeypatch.setattr(
        llama_devices, "list_devices", lambda: (LlamaDevice("CPU", "Cortex-A76", "cpu", 7 * 2**30, 8 * 2**30),)
    )


# list


def test_the_list_says_where_each_comes_from(profiles: Terminal, user_folder: Path) -> None:
    (user_folder / "auto.toml").write_text('[device]\ndescription = "my\\nbox"\n', encoding="utf-8")
    (user_folder / "mine.toml").write_text("", encoding="utf-8")
    (user_folder / "broken.toml").write_text("[draft]\nbit = 8\n", encoding="utf-8")
    code, out, err = profiles("list")
    rows = {line.split()[0]: " ".join(line.split()[1:]) for line in out.splitlines()}
    assert (code, list(rows)) == (0, profile_names())
    assert rows["auto"] == "yours, wins my box"
    assert rows["mine"] == "yours"
    assert rows["broken"].startswith("yours cannot be used: ")
    assert "did you mean 'bits'?" in rows["broken"]
    assert rows["cpu-small"].startswith("shipped no GPU")
    assert str(user_folder) in err


def test_the_list_as_json(profiles: Terminal, user_folder: Path) -> None:
    (user_folder / "auto.toml").write_text("[draft]\nbit = 8\n", encoding="utf-8")
    code, out, err = profiles("list --json")
    rows = {row.pop("name"): row for row in json.loads(out)}
    assert (code, err, out.count("\n"), list(rows)) == (0, "", 1, profile_names())
    assert rows["auto"]["origin"] == "user"
    assert rows["auto"]["replaces_shipped"] is True
    assert "did you mean 'bits'?" in rows["auto"]["error"]
    assert rows["dual-gpu"] == {
        "description": load_profile("dual-gpu").device.description,
        "origin": "shipped",
        "replaces_shipped": False,
        "path": str(ROOT / "device_profiles" / "dual-gpu.toml"),
        "error": None,
    }


# show


def test_show_prints_a_profile_in_full(profiles: Terminal, tmp_path: Path) -> None:
    code, out, err = profiles("show raspberry-pi-5")
    assert (code, out, err) == (0, as_toml(load_profile("raspberry-pi-5")), "")
    copy = tmp_path / "raspberry-pi-5.toml"
    copy.write_text(out, encoding="utf-8")
    assert read_profile(copy) == load_profile("raspberry-pi-5")
    assert profiles(f"show {copy}")[1] == out


def test_show_as_json_has_every_default(profiles: Terminal) -> None:
    content = json.loads(profiles("show auto --json")[1])
    assert (content["name"], content["draft"]["bits"]) == ("auto", Profile("").draft.bits)
    assert content["verifier"]["tensor_split"] == []


# validate


def test_validate_says_ok_or_what_is_wrong(profiles: Terminal, tmp_path: Path) -> None:
    good, bad = tmp_path / "good", tmp_path / "bad.toml"
    good.write_text("[draft]\nbits = 4\n", encoding="utf-8")
    bad.write_text("[draft]\nbits = 5\n", encoding="utf-8")
    assert profiles(f"validate {good}") == (0, "OK\n", "")
    code, out, err = profiles(f"validate {bad}")
    assert (code, out) == (14, "")
    assert err.startswith(f"Error: {bad} [draft] bits: got 5; allowed: 4, 8")
    assert err.count("\n") == 1
    assert json.loads(profiles(f"validate {good} --json")[1]) == {"file": str(good), "valid": True, "error": None}
    code, out, _ = profiles(f"validate {bad} --json")
    assert (code, json.loads(out)["valid"]) == (14, False)
    assert "allowed: 4, 8" in json.loads(out)["error"]


# detect


@pytest.mark.usefixtures("on_a_pi")
def test_detect_explains_its_choice(profiles: Terminal) -> None:
    code, out, err = profiles("detect")
    assert (code, err) == (0, "")
    assert "board: Raspberry Pi 5 Model B Rev 1.0; raspberrypi,5-model-b" in out
    assert "memory this process can have: 7.9 GiB, 7.0 GiB of it free" in out
    assert "llama.cpp: CPU (Cortex-A76), cpu, 8.0 GiB" in out
    assert "\nprofile raspberry-pi-5: the board's name has 'Raspberry Pi 5'\n" in out
    assert "  dual-gpu: it needs 2 GPUs of 7 GiB or more, llama.cpp lists none\n" in out
    assert out.endswith("\nuse it: edgespec run --profile raspberry-pi-5\n")


@pytest.mark.usefixtures("on_a_pi")
def test_detect_as_json(profiles: Terminal) -> None:
    code, out, err = profiles("detect --json")
    content = json.loads(out)
    assert (code, err, content["profile"]) == (0, "", "raspberry-pi-5")
    assert content["command"] == "edgespec run --profile raspberry-pi-5"
    assert len(content["reasons"]) == len(profile_names())
    assert content["box"]["machine"][0] == "Raspberry Pi 5 Model B Rev 1.0"
    assert content["box"]["devices"] == [{"name": "CPU", "description": "Cortex-A76", "kind": "cpu", "memory_gib": 8.0}]


@pytest.mark.usefixtures("on_a_pi")
def test_a_users_profile_is_found_first_and_a_broken_one_is_left_out(profiles: Terminal, user_folder: Path) -> None:
    same = '[device]\nmachines = ["Raspberry Pi 5"]\nmin_memory_gib = 7\n'
    (user_folder / "zebra.toml").write_text(same, encoding="utf-8")
    (user_folder / "broken.toml").write_text("[draft]\nbit = 8\n", encoding="utf-8")
    out = profiles("detect")[1]
    assert "\nprofile zebra: " in out
    assert f"  note: left out: {user_folder / 'broken.toml'} [draft]: unknown key 'bit'" in out


def test_without_llama_cpp_the_rest_is_still_seen(profiles: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise MissingDependencyError("llama-cpp-python does not load: gone; install or rebuild it")

    monkeypatch.setattr(llama_devices, "list_devices", missing)
    code, out, _ = profiles("detect")
    assert code == 0
    assert "note: no list of devices: llama-cpp-python does not load: gone" in out


def test_detect_for_real(profiles: Terminal) -> None:
    code, out, err = profiles("detect --json")
    assert (code, err) == (0, "")
    assert json.loads(out)["profile"] in profile_names()


# The rest


def test_the_bare_group_prints_its_help(profiles: Terminal) -> None:
    code, out, err = profiles("")
    assert (code, err) == (0, "")
    assert "Usage: edgespec profiles" in out
    for name in ("list", "show", "detect", "validate"):
        assert f"\n  {name} " in out


@pytest.mark.parametrize(
    ("line", "code"),
    [("show", 2), ("show nothing", 14), ("show /no/such.toml", 14), ("validate", 2), ("validate /", 14), ("walk", 2),
     ("list more", 2), ("detect --fast", 2), ("validate ''", 14)],
)  # fmt: skip
def test_bad_input_gets_one_line_and_its_exit_code(profiles: Terminal, line: str, code: int) -> None:
    got, out, err = profiles(line)
    assert (got, out, err.count("\n")) == (code, "", 1)
    assert err.startswith("Error: ")


@pytest.mark.parametrize("arguments", [["profiles", "--help"], ["profiles", "list"], ["profiles", "show", "auto"]])
def test_nothing_heavy_is_loaded(arguments: list[str]) -> None:
    script = (
        f"import sys; sys.argv = ['edgespec', *{arguments}]\n"
        "from edgespec.cli.main import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "heavy = ('numpy', 'onnxruntime', 'llama_cpp', 'quantize', 'psutil', 'edgespec.runtime')\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT, env=os.environ
    )
    assert len(done.stdout.splitlines()) > 5
    assert done.stdout.endswith("[]\n")
