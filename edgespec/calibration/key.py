"""What a calibration depends on: models, devices, builds, and how they are used."""

from __future__ import annotations

import collections.abc as abc
import hashlib
import json
import re
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from edgespec.devices.probe import ListedDevice, usable_cpus
from edgespec.devices.profile import Profile, as_dict
from edgespec.paths import cache_dir
from edgespec.verifiers.canary import build_identity
from edgespec.verifiers.llama_options import LlamaOptions

END_BYTES = 2**20  # of a file's beginning and end, where its header and its last weights are
DRAFT_FILES = ("draft.toml", "*.npy", "*.onnx*", "onnx/*.onnx*")
WHOLE_CONTEXT = 2304  # tokens that the deepest measurement needs, and its widest batch
RUNTIMES = ("onnxruntime-gpu", "onnxruntime")
# What of the options changes the cost of a round, apart from what a calibration chooses itself.
OPTIONS = (
    "num_slots", "num_batch", "num_gpu_layers", "flash_attention", "kv_type_k", "kv_type_v", "split_mode",
    "tensor_split", "main_gpu",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Key:
    """Texts and numbers that JSON can hold; where any differs, it is another calibration.

    verifier, draft  the models' files; of a draft without files its name: "lookup", "none"
    devices   llama.cpp's, and what each calls itself
    num_cpus  usable ones
    build     llama.cpp's libraries and the kind of CPU
    runtime   ONNX Runtime's version
    profile   its name and content
    options   the verifier's
    threads   what was asked for; None: nothing
    """

    verifier: str
    draft: str
    devices: tuple[str, ...]
    num_cpus: int
    build: str
    runtime: str
    profile: str
    options: str
    threads: int | None

    def as_dict(self) -> dict[str, Any]:
        """As it reads from JSON."""
        return asdict(self) | {"devices": [*self.devices]}

    @property
    def path(self) -> Path:
        """Where its calibration is kept."""
        return cache_dir() / "calibration" / f"{_short(json.dumps(self.as_dict()))}.json"


def key_of(
    options: LlamaOptions,
    draft: str | Path,
    profile: Profile,
    devices: abc.Iterable[ListedDevice],
    num_threads: int | None = None,
) -> Key:
    """The key of a verifier with ``options`` and a draft: "lookup", "none", or the path of a draft model.

    devices      llama.cpp's list
    num_threads  asked for by the user

    A model file that cannot be read is left to whoever loads it. Raises MissingDependencyError without llama.cpp.
    """
    return Key(
        verifier=_identity(_parts(options.path)),
        draft=str(draft) if draft in ("lookup", "none") else _identity(_draft_files(Path(draft))),
        devices=tuple(f"{device.name}: {device.description}" for device in devices),
        num_cpus=usable_cpus(),
        build=build_identity(),
        runtime=_runtime(),
        profile=f"{profile.name} {_short(json.dumps(as_dict(profile)))}",
        options=" ".join([*(f"{name}={getattr(options, name)}" for name in OPTIONS), f"context={_context(options)}"]),
        threads=num_threads,
    )


def _identity(files: abc.Iterable[Path]) -> str:
    """Sizes and ends of files: quick, however large they are."""
    digest, num_bytes = hashlib.sha256(), 0
    for path in files:
        try:
            with path.open("rb") as file:
                digest.update(file.read(END_BYTES))
                size = file.seek(0, 2)
                file.seek(max(0, size - END_BYTES))
                digest.update(file.read(END_BYTES))
        except OSError:
            size = -1
        digest.update(f" {path.name} {size} ".encode())
        num_bytes += max(0, size)
    return f"{digest.hexdigest()[:16]} {num_bytes}"


def _parts(path: Path) -> list[Path]:
    """The file; of a split GGUF all of its files."""
    found = re.fullmatch(r"(.*-)00001(-of-\d{5}\.gguf)", path.name)
    return sorted(path.parent.glob(f"{_literal(found[1])}?????{found[2]}")) if found else [path]


def _draft_files(path: Path) -> list[Path]:
    """What a draft's folder may hold of a model; with an .onnx file those that hold its weights."""
    if path.is_dir():
        return sorted(file for pattern in DRAFT_FILES for file in path.glob(pattern))
    return sorted({path, *path.parent.glob(f"{_literal(path.name)}*")})


def _literal(text: str) -> str:
    return re.sub(r"([*?\[])", r"[\1]", text)


def _runtime() -> str:
    found = []
    for name in RUNTIMES:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return ", ".join(found)


def _context(options: LlamaOptions) -> int | str:
    """One too short to measure all of it is a case of its own."""
    return options.num_ctx if options.num_ctx is not None and options.num_ctx < WHOLE_CONTEXT else "whole"


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
