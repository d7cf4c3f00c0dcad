"""What is installed: Python and packages, llama.cpp as it was built, ONNX Runtime, the cache folder."""

from __future__ import annotations

import collections.abc as abc
import importlib.metadata
import platform
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from edgespec.devices.memory import size_text
from edgespec.doctor.finding import Finding, ok, said
from edgespec.doctor.job import Case, child
from edgespec.drafters.onnx_providers import CUDA
from edgespec.drafters.onnx_providers import providers as onnx_providers
from edgespec.errors import BackendError, FileAccessError, MissingDependencyError, ModelFormatError
from edgespec.paths import cache_dir
from edgespec.verifiers.canary import rebuild_command, use_extra_bufts
from edgespec.verifiers.child import how_it_ended

CACHE_BYTES = 64 * 2**20  # what edgespec notes there besides draft models, and room to spare
# Asks llama.cpp all that the doctor asks it later, where its death is only an answer.
PREFLIGHT = """
import pathlib, sys
from edgespec.verifiers.llama_devices import list_devices
from edgespec.verifiers.llama_gguf import read_header
from edgespec.verifiers.llama_vocabulary import open_vocabulary
from edgespec.errors import EdgespecError
list_devices()
for path in map(pathlib.Path, sys.argv[1:]):
    try:
        read_header(path)
        open_vocabulary(path).__enter__()
    except EdgespecError:
        pass  # the doctor meets it again
"""


def packages(case: Case) -> abc.Iterator[Finding]:
    """The versions edgespec was installed for."""
    what = "Python and packages"
    found = {"Python": platform.python_version(), "edgespec": _version("edgespec") or "from a checkout"}
    for name, least in _requirements():
        version = _version(name)
        if version is None or _numbers(version) < _numbers(least):
            message = (
                f"{name} {version or 'is not installed'}, {least} or newer is needed; pip install '{name}>={least}'"
            )
            yield said(what, "problem", message, MissingDependencyError)
        found[name] = version or "missing"
    yield ok(what, ", ".join(f"{name} {version}" for name, version in found.items()))


def _requirements() -> list[tuple[str, str]]:
    """Names and least versions, of what every platform needs: ONNX Runtime has its own check."""
    try:
        lines = importlib.metadata.requires("edgespec") or []
    except importlib.metadata.PackageNotFoundError:
        return []
    matches = [re.match(r"([\w.-]+)[^;]*?>=([\d.]+)[^;]*$", line) for line in lines]
    return sorted((match[1], match[2]) for match in matches if match)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version.split("+")[0])[:3]]


def llama(case: Case) -> abc.Iterator[Finding]:
    """llama.cpp, first in a process of its own, then its devices."""
    what = "llama.cpp"
    failure = _dies()
    if failure:
        yield said(what, "problem", f"{failure}; rebuild it: {rebuild_command()}", BackendError)
        return
    from edgespec.verifiers.llama_devices import list_devices
    from edgespec.verifiers.llama_rpc import supports_rpc

    devices = list_devices()
    case.llama = True
    listed = ", ".join(f"{device.name} ({device.description})" for device in devices)
    rpc = "with RPC" if supports_rpc() else "without RPC, which workers need"
    yield ok(what, f"llama-cpp-python {_version('llama-cpp-python')}, {rpc}; devices: {listed}")


def _dies(*arguments: str) -> str:
    """How a process ends that asks llama.cpp, in words; "" where it does not."""
    try:
        done = child(["-c", PREFLIGHT, *arguments])
    except subprocess.TimeoutExpired as error:
        return f"llama.cpp does not answer within {error.timeout:g} s"
    if done.returncode < 0:
        return f"llama.cpp ends the process: {how_it_ended(done.returncode)}"
    return ""  # an exception would come again, with its own words


def check_survives(gguf: Path) -> None:
    """Raise ModelFormatError for a GGUF at which llama.cpp aborts."""
    if failure := _dies(str(gguf.absolute())):
        raise ModelFormatError(f"{gguf}: {failure}; get the model again")


def canary(case: Case) -> Finding:
    """Whether this build decodes on this CPU. A remembered answer costs nothing."""
    what = "repacked weights (AMX canary)"
    if use_extra_bufts(cache_dir()):
        return ok(what, "they work on this CPU")
    detail = "this build cannot use them on this CPU, so they are off, which is slower"
    return said(what, "note", f"{detail}; rebuild it, adding the CMAKE_ARGS you built it with: {rebuild_command()}")


def onnx_runtime(case: Case) -> Finding:
    """Which providers it lists; whether CUDA works shows when the draft model is opened."""
    what = "ONNX Runtime"
    try:
        case.providers = onnx_providers()
    except MissingDependencyError as error:
        is_wanted = case.mode != "plain" and case.job.draft not in ("lookup", "none")
        return said(what, "problem" if is_wanted else "note", str(error), MissingDependencyError)
    detail = f"{_version('onnxruntime-gpu') or _version('onnxruntime') or ''}, lists {', '.join(case.providers)}"
    return ok(what, f"{detail.lstrip(', ')}{'' if CUDA in case.providers else ': draft models run on the CPU'}")


def cache_folder(case: Case) -> Finding:
    what, folder = "cache folder", cache_dir()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".doctor-"):
            pass
    except OSError as error:
        reason = error.strerror or error
        message = f"{folder} cannot be written to: {reason}; set EDGESPEC_CACHE_DIR to a folder of yours"
        return said(what, "problem", message, FileAccessError)
    return ok(what, str(folder))


def check_space(num_bytes: int) -> Finding:
    """Whether the cache folder's disk has so much."""
    what = "disk"
    folder = next((folder for folder in (cache_dir(), *cache_dir().absolute().parents) if folder.is_dir()), Path())
    free = shutil.disk_usage(folder).free
    detail = f"{size_text(free)} free at {folder}"
    if free >= num_bytes:
        return ok(what, detail)
    message = f"{detail}, {size_text(num_bytes)} needed; make room there, or set EDGESPEC_CACHE_DIR to another disk"
    return said(what, "problem", message, FileAccessError)
