"""llama.cpp's own server, for comparison: started with the same model, asked over HTTP, stopped."""

from __future__ import annotations

import collections.abc as abc
import contextlib
import json
import re
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgespec.core.sequence import SamplingParams

START_S = 120.0


@dataclass(frozen=True)
class ServerModels:
    binary: Path
    verifier: Path
    draft: Path | None
    num_ctx: int
    num_threads: int


def spec_types(binary: Path) -> list[str]:
    """The ways of speculation this build knows, as its --help lists them."""
    text = subprocess.run([binary, "--help"], capture_output=True, text=True, check=False).stdout
    found = re.search(r"--spec-type\s+(\S+)", text)
    return found[1].split(",") if found else []


def plain_way() -> list[str]:
    return ["--spec-type", "none"]


def draft_way(draft: Path, num_draft: int, num_threads: int) -> list[str]:
    return [
        "--spec-type", "draft-simple", "--spec-draft-model", str(draft),
        "--spec-draft-n-max", str(num_draft), "--spec-draft-threads", str(num_threads),
    ]  # fmt: skip


@contextlib.contextmanager
def running(models: ServerModels, way: abc.Sequence[str]) -> abc.Iterator[str]:
    """The server's address, once it answers. Raises RuntimeError with the end of its log where it does not start."""
    port = free_port()
    command = [
        str(models.binary), "--model", str(models.verifier), "--ctx-size", str(models.num_ctx), "--parallel", "1",
        "--threads", str(models.num_threads), "--threads-batch", str(models.num_threads),
        "--host", "127.0.0.1", "--port", str(port), *way,
    ]  # fmt: skip
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            _wait(process, f"http://127.0.0.1:{port}", log)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait()


def complete(address: str, tokens: abc.Sequence[int], params: SamplingParams) -> dict[str, float]:
    """The timings of an answer: predicted_n tokens in predicted_ms, the prompt's evaluation apart."""
    body = {
        "prompt": list(tokens),
        "n_predict": params.max_tokens,
        "temperature": params.temperature,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "min_p": params.min_p,
        "seed": params.seed or 0,
        "cache_prompt": False,
    }
    request = urllib.request.Request(
        f"{address}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=600) as answer:
        timings: dict[str, float] = json.load(answer)["timings"]
    return timings


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _wait(process: subprocess.Popen[bytes], address: str, log: Any) -> None:
    last = time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < last:
        try:
            with urllib.request.urlopen(f"{address}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):  # not there yet, or still loading
            time.sleep(0.2)
    log.seek(0)
    tail = log.read()[-600:].decode("utf-8", "replace")
    raise RuntimeError(f"llama-server does not start: {' '.join(tail.split())}")
