"""The measuring commands of the pipeline still run: over tiny models, with costs that mean nothing."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from edgespec.core.policy import Fixed
from edgespec.engine.draft_thread import DraftThread
from edgespec.engine.loops import sequential
from edgespec.engine.rounds import Guide
from edgespec.verifiers.llama_rpc import supports_rpc
from tests.bench import llama_server, never_slower, overhead, overlap, pipeline, software_device

# What llama-server answers, as far as it is asked: each token takes it ten milliseconds.
SERVER = """#!{python}
import http.server, json, sys
if "--help" in sys.argv:
    print("--spec-type none,draft-simple,ngram-simple,ngram-mod\\n    ways of speculation"); sys.exit()
if "--broken" in sys.argv or "nowhere" in " ".join(sys.argv):
    print("cannot open the model"); sys.exit(3)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self): self.say({{}})
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert all(isinstance(token, int) for token in body["prompt"]) and body["cache_prompt"] is False
        n = body["n_predict"]
        drafted = {{"draft_n": n, "draft_n_accepted": n // 2}} if "draft-simple" in sys.argv else {{}}
        self.say({{"timings": {{"predicted_n": n, "predicted_ms": 10.0 * (n - 1), **drafted}}}})
    def say(self, content):
        data = json.dumps(content).encode()
        self.send_response(200); self.send_header("Content-Length", str(len(data))); self.end_headers()
        self.wfile.write(data)
    def log_message(self, *_): pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    lines = [json.dumps({"category": name, "turns": ["the cat and the ring"]}) for name in ("qa", "writing", "qa")]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return tmp_path / "prompts.jsonl"


@pytest.fixture
def server(tmp_path: Path) -> Path:
    binary = tmp_path / "llama-server"
    binary.write_text(SERVER.format(python=sys.executable), encoding="utf-8")
    binary.chmod(0o755)
    return binary


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.split("|")[1:-1]]


# Overlap


def test_overlap_prints_a_row_a_ratio(capsys: pytest.CaptureFixture[str]) -> None:
    overlap.main(["--shorter-ms", "2", "--rounds", "3"])
    lines = capsys.readouterr().out.splitlines()
    assert [cells(line)[0] for line in lines[2:-1]] == ["1:4", "1:2", "1:1", "2:1", "4:1"]
    assert cells(lines[2])[1:3] == ["2.0", "8.0"]
    assert lines[-1].startswith("worst: ")


def test_overlap_judges_by_the_longer_side_and_the_slack() -> None:
    times = overlap.Times(0.010, 0.020, overlapped_s=0.0222, worst_s=0.03, sequential_s=0.03)
    assert times.best_s == 0.020
    assert times.passed
    assert not times._replace(overlapped_s=0.0224).passed
    assert "OVER THE LIMIT" in overlap.table([times] * 4 + [times._replace(overlapped_s=0.0224)])


def test_the_scripted_sides_agree_on_every_token() -> None:
    sequence = overlap._sequence(3)
    drafter = DraftThread(overlap.ScriptedDrafter(0.0))
    rounds = list(sequential(sequence, drafter, overlap.ScriptedVerifier(0.0), Guide(Fixed(overlap.LENGTH))))
    drafter.close()
    assert [round_.accepted for round_ in rounds[:-1]] == [overlap.LENGTH] * (len(rounds) - 1)
    assert sequence.tokens == [token % overlap.NUM_VOCAB for token in range(len(sequence.tokens))]


# Overhead


def test_overhead_prints_both_ways_to_sample(capsys: pytest.CaptureFixture[str]) -> None:
    overhead.main(["--rounds", "5", "--repeats", "1", "--vocabulary", "4000"])
    lines = capsys.readouterr().out.splitlines()
    assert [cells(line)[0] for line in lines[2:]] == ["greedy", "top-k 40"]
    assert all(float(cell) >= 0 for line in lines[2:] for cell in cells(line)[1:])
    assert [cells(line)[2] for line in lines[2:]] == ["0.30", "1.20"]


# Never slower


def test_never_slower_prints_a_row_a_setting(
    tiny_gguf: Path, own_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    models = ("--verifier", tiny_gguf, "--draft", own_folder, "--threads", 1, "--ids", 20, 260, "--random-tokens", 20)
    never_slower.main([*map(str, models), "--runs", "2", "--max-tokens", "6", "--parallel", "3"])
    lines = capsys.readouterr().out.splitlines()
    rows = [cells(line) for line in lines[2:-1]]
    assert [row[0] for row in rows] == ["random", "hot", "untrained", "one word", "parallel"]
    assert all(len(row[3].split(",")) == 2 and float(row[1]) > 0 < float(row[2]) for row in rows)
    assert lines[-1].startswith("worst: ")


def test_never_slower_runs_the_settings_it_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        never_slower.main(["--settings", "hot,cold"])
    assert "settings: got 'cold'; allowed: random, hot, untrained, one word, parallel" in capsys.readouterr().err
    assert never_slower.main(["--settings", "hot", "--verifier", "nowhere.gguf"]) == 3


# Against llama-server


def test_pipeline_prints_a_table_a_temperature(prompts: Path, tiny_gguf: Path, own_folder: Path) -> None:
    models = ("--verifier", tiny_gguf, "--draft", own_folder, "--threads", 1)
    options = map(str, (prompts, *models, "--every", 1, "--max-tokens", 8))
    result = CliRunner().invoke(pipeline.main, [*options])
    assert result.exit_code == 0, result.exception
    assert result.stdout.startswith("auto is: ")
    lines = result.stdout.splitlines()[2:]
    assert cells(lines[0]) == ["T=0", "plain, tokens/s", "auto / plain", "acceptance"]
    assert [cells(line)[0] for line in lines[2:5]] == ["multi-turn (1)", "qa (2)", "all (3)"]
    assert cells(lines[6])[0] == "T=0.8"


def test_pipeline_compares_with_the_servers_best(
    prompts: Path, tiny_gguf: Path, own_folder: Path, server: Path
) -> None:
    models = ("--verifier", tiny_gguf, "--draft", own_folder, "--threads", 1, "--temperature", 0)
    rival = ("--llama-server", server, "--draft-gguf", tiny_gguf, "--draft-max", "3,5")
    options = map(str, (prompts, *models, *rival, "--every", 2, "--max-tokens", 8))
    result = CliRunner().invoke(pipeline.main, [*options])
    assert result.exit_code == 0, result.exception
    lines = result.stdout.splitlines()[2:]
    assert cells(lines[0])[4:] == [
        "server plain / plain", "server draft 3 / plain", "server ngram-simple / plain", "auto / its best",
    ]  # fmt: skip
    assert "server draft 5: 100.0 tokens/s, acceptance 0.50" in lines
    assert "server ngram-mod: 100.0 tokens/s, acceptance 0.00" in lines


def test_pipeline_can_be_told_which_ways(prompts: Path, tiny_gguf: Path, own_folder: Path, server: Path) -> None:
    models = ("--verifier", tiny_gguf, "--draft", own_folder, "--threads", 1, "--temperature", 0)
    rival = ("--llama-server", server, "--draft-gguf", tiny_gguf, "--ways", "server plain, server draft 7")
    options = map(str, (prompts, *models, *rival, "--every", 3, "--max-tokens", 4))
    result = CliRunner().invoke(pipeline.main, [*options])
    assert result.exit_code == 0, result.exception
    assert [line.split(":")[0] for line in result.stdout.splitlines()[2:] if ": " in line] == [
        "server plain",
        "server draft 7",
    ]


def test_a_server_that_does_not_start_is_quoted(server: Path) -> None:
    models = llama_server.ServerModels(server, Path("nowhere"), None, 64, 1)
    with pytest.raises(RuntimeError, match="does not start: cannot open the model"), llama_server.running(models, []):
        pass


# The software device


@pytest.mark.skipif(not supports_rpc(), reason="this llama.cpp is built without -DGGML_RPC=ON")
def test_software_device_prints_a_row_a_length(prompts: Path, tiny_gguf: Path, own_folder: Path) -> None:
    models = ("--verifier", tiny_gguf, "--draft", own_folder, "--draft-lengths", "1,3")
    result = CliRunner().invoke(software_device.main, [*map(str, (prompts, *models, "--every", 2, "--max-tokens", 8))])
    assert result.exit_code in (0, 1), result.exception
    assert isinstance(result.exception, SystemExit | None)
    rows = [cells(line) for line in result.stdout.splitlines()[2:]]
    assert [row[:2] for row in rows] == [["draft", "1"], ["draft", "3"]]
    assert all(float(row[5]) > 0 for row in rows)


def test_software_device_judges_by_what_a_draft_costs() -> None:
    row = software_device.Row("draft", 3, [10.0, 10.0], [11.0, 11.0], [10.0, 10.0], 0.05, 0.1, 1)
    assert row.share == 0.5
    assert not row.passed
    row.overlapped = [12.0, 12.0]
    assert row.passed
    row.overlapped, row.verify_s = [8.0, 8.0], 1.0
    assert row.passed
    row.chosen = [9.0, 9.0]
    assert not row.passed
    assert "BELOW" in row.line()
