"""Device profiles: what a device can do and how to use it. This file holds every key, its default and what it may be.

``device_profiles/README.md`` explains the keys for people; a test compares the two.
"""

from __future__ import annotations

import collections.abc as abc
import difflib
import os
import re
import sys
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

import tomli_w

from edgespec.devices.section import Section, native, number, numbers, one_of, shown, texts
from edgespec.errors import ProfileError
from edgespec.paths import config_dir, data_dir

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

GIB = 2**30
DEFAULT_PROFILE = "auto"
MAX_FILE_BYTES = 2**20  # a profile has a few hundred; more is another kind of file
# llama.cpp's file types: whole file types first, then by bits a weight, roughly
GGUF_TYPES = (
    "F32", "F16", "BF16", "Q8_0", "Q6_K", "Q5_K_M", "Q5_K_S", "Q5_1", "Q5_0", "Q4_K_M", "Q4_K_S", "Q4_1", "Q4_0",
    "IQ4_NL", "IQ4_XS", "MXFP4_MOE", "Q3_K_L", "Q3_K_M", "Q3_K_S", "IQ3_M", "IQ3_S", "IQ3_XS", "IQ3_XXS",
    "Q2_K", "Q2_K_S", "Q2_0", "IQ2_M", "IQ2_S", "IQ2_XS", "IQ2_XXS", "TQ2_0", "TQ1_0", "IQ1_M", "IQ1_S", "Q1_0",
)  # fmt: skip
PLAIN_KV_TYPES = ("f32", "f16", "bf16")
KV_TYPES = (*PLAIN_KV_TYPES, "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")
FLASH_ATTENTION = ("auto", "on", "off")
SPLIT_MODES = ("none", "layer", "row")
POLICIES = ("goodput", "threshold", "fixed")
MODES = ("auto", "plain", "sequential", "overlapped")
MAX_GPUS = 16  # llama.cpp's
MAX_WORKERS = 16  # of them too: each brings a device or more
HINT = "device_profiles/README.md explains every key"
_T = TypeVar("_T", bound="Section")


@dataclass(frozen=True, slots=True)
class Device(Section):
    """How a device is recognised (all that is said must hold), and what it has. 0 and empty: does not matter.

    machines            parts of the board's own name (device tree, DMI), any case; one of them must be in it
    min_gpus, min_gpu_memory_gib  llama.cpp lists at least so many GPUs of at least so much memory each
    min_memory_gib      the process can have at least so much main memory
    max_cpus, max_memory_gib  llama.cpp lists no GPU, and there are at most so many usable CPUs or so much main memory
    memory_budget_gib   main memory that models, caches and buffers may take; 0: nine tenths of what the process may use
    gpu_memory_budget_gib  the same for all GPUs together; 0: nine tenths of what they have
    unified_memory      GPU and CPU share the main memory: everything counts once, against memory_budget_gib
    """

    description: str = ""
    machines: tuple[str, ...] = texts()
    min_gpus: int = number(0, 0, MAX_GPUS)
    min_gpu_memory_gib: float = number(0.0, 0, 2**16)
    min_memory_gib: float = number(0.0, 0, 2**16)
    max_cpus: int = number(0, 0, 2**16)
    max_memory_gib: float = number(0.0, 0, 2**16)
    memory_budget_gib: float = number(0.0, 0, 2**16)
    gpu_memory_budget_gib: float = number(0.0, 0, 2**16)
    unified_memory: bool = False

    def __post_init__(self) -> None:
        Section.__post_init__(self)
        if not all(part.strip() for part in self.machines):
            raise ProfileError("machines: got an empty text, which is in every name; allowed: parts of a board's name")


@dataclass(frozen=True, slots=True)
class Draft(Section):
    """threads: 0 is the usable CPUs. head_vocab: ids the draft may propose; 0 is all of them."""

    provider: str = one_of("cpu", ("cpu", "cuda"))
    threads: int = number(0, 0, 1024)
    bits: int = one_of(8, (4, 8))
    block_size: int = one_of(32, (16, 32, 64, 128))
    head_vocab: int = number(0, 0, 2**24)


@dataclass(frozen=True, slots=True)
class Verifier(Section):
    """How llama.cpp runs the verifier.

    gpu_layers    -1: as many as fit the memory that is free, all where they do; a number: so many, fit or not
    threads       0 is the usable CPUs
    tensor_split  a share per GPU; empty: by free memory
    rpc           workers whose devices are used too, each "host:port"
    isolate       a process of its own, which a device may take down with it; with ``rpc`` it is so anyway
    """

    gpu_layers: int = number(-1, -1, 10_000)
    threads: int = number(0, 0, 1024)
    gguf_type: str = one_of("Q4_K_M", GGUF_TYPES)
    kv_type_k: str = one_of("f16", KV_TYPES)
    kv_type_v: str = one_of("f16", KV_TYPES)
    flash_attention: str = one_of("auto", FLASH_ATTENTION)
    split_mode: str = one_of("layer", SPLIT_MODES)
    tensor_split: tuple[float, ...] = numbers(0, 2**20)
    main_gpu: int = number(0, 0, MAX_GPUS - 1)
    rpc: tuple[str, ...] = texts()
    isolate: bool = False

    def __post_init__(self) -> None:
        Section.__post_init__(self)
        self._check_cache()
        self._check_workers()
        if len(self.tensor_split) > MAX_GPUS or (self.tensor_split and not any(self.tensor_split)):
            raise ProfileError(
                f"tensor_split: got {shown(self.tensor_split)}; allowed: a share for each of at most {MAX_GPUS} GPUs, "
                "one of them above 0"
            )

    def _check_cache(self) -> None:
        if self.kv_type_v not in PLAIN_KV_TYPES and self.flash_attention == "off":
            raise ProfileError(
                f"kv_type_v: got {self.kv_type_v!r} with flash_attention 'off', which llama.cpp cannot do; "
                f"allowed: {', '.join(PLAIN_KV_TYPES)}, or flash_attention 'auto' or 'on'"
            )

    def _check_workers(self) -> None:
        wrong = [worker for worker in self.rpc if not _is_worker(worker)]
        if wrong or len(set(self.rpc)) < len(self.rpc) or len(self.rpc) > MAX_WORKERS:
            got = shown(wrong[0]) if wrong else shown(self.rpc)
            raise ProfileError(
                f"rpc: got {got}; allowed: at most {MAX_WORKERS} different texts like '192.168.0.7:50052', a name or "
                "an IPv4 address, and a port"
            )


@dataclass(frozen=True, slots=True)
class Speculation(Section):
    """How long drafts are, and what runs beside what.

    num_candidates         the draft length of policy "fixed", and the first one of "threshold"
    max_speculative_steps  how far the draft model may run ahead of the verifier; 0: not at all
    mode                   "auto" takes what pays on this box; the others are taken as they are
    pin                    each side keeps to CPUs of its own where both work at the same time
    """

    num_candidates: int = number(7, 0, 32)
    max_speculative_steps: int = number(8, 0, 64)
    policy: str = one_of("goodput", POLICIES)
    mode: str = one_of("auto", MODES)
    pin: bool = False


@dataclass(frozen=True, slots=True)
class Serving(Section):
    """context: most tokens of prompt and answer of one sequence."""

    max_batch_size: int = number(1, 1, 256)
    target_batch_size: int = number(1, 1, 256)
    batch_timeout_ms: float = number(5.0, 0, 60_000)
    context: int = number(4096, 1, 2**24)

    def __post_init__(self) -> None:
        Section.__post_init__(self)
        if self.target_batch_size > self.max_batch_size:
            raise ProfileError(
                f"target_batch_size: got {self.target_batch_size}; allowed: at most max_batch_size "
                f"({self.max_batch_size})"
            )


@dataclass(frozen=True, slots=True)
class Profile:
    """One device. ``name`` is the file's. The defaults are what edgespec does without a profile."""

    name: str
    device: Device = field(default_factory=Device)
    draft: Draft = field(default_factory=Draft)
    verifier: Verifier = field(default_factory=Verifier)
    speculation: Speculation = field(default_factory=Speculation)
    serving: Serving = field(default_factory=Serving)


SECTIONS: dict[str, type[Section]] = {
    key.name: key.default_factory  # type: ignore[misc]
    for key in fields(Profile)
    if key.name != "name"
}


@dataclass(frozen=True, slots=True)
class ProfileFile:
    """Where a profile of this name comes from: the user's folder, or edgespec itself.

    replaces  a shipped profile has the same name, and the user's is taken
    """

    name: str
    path: Path
    is_user: bool
    replaces: bool


def user_dir() -> Path:
    """Where the user's own profiles lie (not created here)."""
    return config_dir() / "profiles"


def profile_files() -> list[ProfileFile]:
    """Every name once, in alphabetical order. Raises ProfileError where the user's folder cannot be looked into."""
    user, shipped = _toml_files(user_dir()), _toml_files(data_dir("device_profiles"))
    return [
        ProfileFile(name, path, name in user, name in user and name in shipped)
        for name, path in sorted((shipped | user).items())
    ]


def profile_names() -> list[str]:
    return [file.name for file in profile_files()]


def load_profile(name_or_path: str) -> Profile:
    """The user's profile of that name, else the shipped one; what has a separator or ends in .toml is a path.

    Raises ProfileError: no such profile, or a file that is not right.
    """
    separators = [separator for separator in (os.sep, os.altsep) if separator]
    if name_or_path.endswith(".toml") or any(separator in name_or_path for separator in separators):
        return read_profile(Path(name_or_path))
    files = {file.name: file.path for file in profile_files()}
    if name_or_path not in files:
        near = difflib.get_close_matches(name_or_path, files, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ProfileError(
            f"unknown profile {name_or_path!r}; known profiles: {', '.join(files) or 'none'}, or a path to a .toml file"
            f"{hint}"
        )
    return read_profile(files[name_or_path])


def read_profile(path: Path) -> Profile:
    """Read one file, strictly. Raises ProfileError with the file, the key and what is allowed, on one line."""
    content = _content(path)
    for key in content:
        if key not in SECTIONS:
            raise ProfileError(f"{path}: unknown key or section {shown(key)}; {_nearest(key, SECTIONS, None)}; {HINT}")
    sections: dict[str, Any] = {
        name: _section(SECTIONS[name], table, f"{path} [{name}]") for name, table in content.items()
    }
    return Profile(path.stem, **sections)


def as_dict(profile: Profile) -> dict[str, Any]:
    """Everything, defaults filled in."""
    return asdict(profile)


def as_toml(profile: Profile) -> str:
    """Everything, defaults filled in, as a profile file that reads as the same profile."""
    return tomli_w.dumps({name: asdict(getattr(profile, name)) for name in SECTIONS})


def _is_worker(text: str) -> bool:
    """As llama.cpp's RPC has it: a name or an IPv4 address, and a port."""
    found = re.fullmatch(r"[A-Za-z0-9_.-]+:([0-9]{1,5})", text)
    return found is not None and 0 < int(found[1]) < 2**16


def _toml_files(folder: Path) -> dict[str, Path]:
    try:
        return {path.stem: path for path in folder.iterdir() if path.suffix == ".toml" and path.name[0] != "."}
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        reason = error.strerror or error
        raise ProfileError(
            f"cannot look into {folder}: {reason}; set EDGESPEC_CONFIG_DIR to a folder of yours"
        ) from None


def _content(path: Path) -> dict[str, Any]:
    try:
        if path.exists() and not path.is_file():  # to open a pipe would wait for its other end
            raise ProfileError(f"{path} is not a regular file; give the path of a profile, a .toml file")
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = getattr(error, "strerror", None) or error
        raise ProfileError(f"cannot read the profile {path}: {reason}; give the path of a .toml file") from None
    if len(data) > MAX_FILE_BYTES:
        raise ProfileError(f"{path} is larger than {MAX_FILE_BYTES} bytes: no profile; give the path of a .toml file")
    try:
        return tomllib.loads(data.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:  # TOMLDecodeError, UnicodeDecodeError, tables within tables
        raise ProfileError(f"{path} is not valid TOML: {error}; correct it") from None


def _section(kind: type[_T], table: Any, where: str) -> _T:
    if not isinstance(table, dict):
        raise ProfileError(f"{where}: got {shown(table)}; allowed: a table of keys; {HINT}")
    known = {key.name: key for key in fields(kind)}
    for key in table:
        if key not in known:
            raise ProfileError(f"{where}: unknown key {shown(key)}; {_nearest(key, known, kind)}; {HINT}")
    try:
        return kind(**{key: native(value, known[key]) for key, value in table.items()})
    except ProfileError as error:
        raise ProfileError(f"{where} {error}; {HINT}") from None


def _nearest(key: str, valid: abc.Iterable[str], kind: type[Section] | None) -> str:
    """What was meant: the key in the section where it belongs, the nearest one here, or all there are."""
    homes = [name for name, section in SECTIONS.items() if key in {each.name for each in fields(section)}]
    if homes:
        return f"it belongs into {' or '.join(f'[{name}]' for name in homes)}"
    valid = list(valid)
    near = difflib.get_close_matches(key.lower(), valid, n=1)
    return f"did you mean {near[0]!r}?" if near else f"allowed: {', '.join(valid)}"
