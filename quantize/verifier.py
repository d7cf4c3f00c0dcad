"""A GGUF in, a GGUF of another type out. llama.cpp does all of it, in a process of its own."""

from __future__ import annotations

import difflib
import logging
import os
import shutil
from pathlib import Path

from edgespec.devices.gguf_sizes import parts
from edgespec.devices.probe import usable_threads
from edgespec.errors import FileAccessError, ModelFormatError, ModelNotFoundError, ParameterError
from quantize.draft import Progress
from quantize.folder import new_file
from quantize.verifier_process import Job, Plan, started

logger = logging.getLogger("edgespec")

# llama.cpp's names for the types of a whole file, and its numbers for them (LLAMA_FTYPE_*): all that it can write.
TYPES = {
    "F32": 0,
    "BF16": 32,
    "F16": 1,
    "Q8_0": 7,
    "Q6_K": 18,
    "Q5_K_M": 17,
    "Q5_K_S": 16,
    "Q5_1": 9,
    "Q5_0": 8,
    "Q4_K_M": 15,
    "Q4_K_S": 14,
    "Q4_1": 3,
    "Q4_0": 2,
    "IQ4_NL": 25,
    "IQ4_XS": 30,
    "MXFP4_MOE": 38,
    "Q3_K_L": 13,
    "Q3_K_M": 12,
    "Q3_K_S": 11,
    "IQ3_M": 27,
    "IQ3_S": 26,
    "IQ3_XS": 22,
    "IQ3_XXS": 23,
    "Q2_K": 10,
    "Q2_K_S": 21,
    "Q2_0": 41,
    "TQ2_0": 37,
    "IQ2_M": 29,
    "IQ2_S": 28,
    "IQ2_XS": 20,
    "IQ2_XXS": 19,
    "TQ1_0": 36,
    "IQ1_M": 31,
    "IQ1_S": 24,
    "Q1_0": 40,
}


def quantize_verifier(
    source: Path,
    out: Path,
    kind: str,
    *,
    imatrix: Path | None = None,
    requantize: bool = False,
    num_threads: int | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> Path:
    """Write ``source`` as a GGUF of another type and return ``out``, which appears whole or not at all.

    source            a GGUF; of a split one its first file (what is written is one file)
    kind              a name of TYPES. Rows that a type's blocks do not divide get the next larger type that fits
    imatrix           importance matrix of this model, for the types below 3 bits, and better ones above
    requantize  accept a source that is quantized already: each time costs quality
    num_threads       None: the usable CPUs
    force             replace ``out``; a source is never written
    progress          called on this thread with what is being done and the finished fraction, 0 to 1

    Ctrl-C, a kill of either process or a full disk leave nothing behind. Raises ParameterError (unknown type, quantized
    source, a type that needs a matrix), ModelNotFoundError, ModelFormatError, FileAccessError, MissingDependencyError,
    or BackendError when llama.cpp's process dies.
    """
    kind = _checked_type(kind)
    job = Job(source, TYPES[kind], imatrix, _checked_threads(num_threads))
    report = progress or (lambda stage, fraction: None)
    report("reading", 0.0)
    files = _checked_parts(source)
    with new_file(out, force=force, sources=files) as made, started(job, made) as child:
        plan = child.plan()
        _check_plan(plan, job, kind, requantize)
        _check_room(out, sum(tensor.target_bytes for tensor in plan.tensors))
        child.convert(plan, report)
    report("done", 1.0)
    return out


def predicted_bytes(source: Path, kind: str) -> int:
    """Size of the file that ``quantize_verifier`` would write, without a matrix: llama.cpp's own plan, so a type that
    needs one is no error here. Exact but for some hundred bytes of metadata. Raises as ``quantize_verifier`` does.
    """
    job = Job(source, TYPES[_checked_type(kind)], None, 1)
    files = _checked_parts(source)
    with started(job, Path(os.devnull)) as child:
        tensors = child.plan().tensors
    header = sum(file.stat().st_size for file in files) - sum(tensor.source_bytes for tensor in tensors)
    return max(header, 0) + sum(tensor.target_bytes for tensor in tensors)


def _checked_type(kind: str) -> str:
    name = kind.upper()
    if name not in TYPES:
        near = difflib.get_close_matches(name, TYPES, n=2)
        hint = f"; nearest: {', '.join(near)}" if near else ""
        raise ParameterError(f"type: got {kind!r}; allowed: {', '.join(TYPES)}{hint}")
    return name


def _checked_threads(num_threads: int | None) -> int:
    is_number = isinstance(num_threads, int) and not isinstance(num_threads, bool)
    if num_threads is not None and (not is_number or num_threads < 1):
        raise ParameterError(f"num_threads: got {num_threads!r}; allowed: a whole number of 1 or more")
    return usable_threads(num_threads)


def _checked_parts(source: Path) -> tuple[Path, ...]:
    """The files the model is made of. Only what can be seen without llama.cpp is looked at."""
    found = parts(source)
    for path in found:
        try:
            if path.exists() and not path.is_file():
                raise FileAccessError(f"{path} is not a regular file; give the path of a GGUF file")
            with path.open("rb") as stream:
                magic = stream.read(4)
        except (FileNotFoundError, NotADirectoryError):
            part = "" if path == source else f", a part of {source}"
            raise ModelNotFoundError(f"no model file at {path}{part}; give the path of a GGUF file") from None
        except OSError as error:
            raise FileAccessError(f"{path} cannot be read: {error.strerror or error}; check its permissions") from error
        if magic != b"GGUF":
            raise ModelFormatError(
                f"{path}: not a GGUF file, it begins with {magic!r}; download it again or choose another"
            )
    return found


def _check_plan(plan: Plan, job: Job, kind: str, requantize: bool) -> None:
    again = [tensor for tensor in plan.tensors if tensor.requantized]
    if again and not requantize:
        raise ParameterError(
            f"{job.source} is quantized already: {len(again)} of its {len(plan.tensors)} tensors would go from "
            f"{again[0].source} to {kind}, which costs quality twice; start from the F16 or BF16 file, or allow it "
            "(requantize)"
        )
    if job.imatrix is not None:
        from quantize.imatrix import check_imatrix, read_imatrix

        check_imatrix(job.imatrix, read_imatrix(job.imatrix), {tensor.name: tensor.shape for tensor in plan.tensors})
    elif plan.needs_imatrix:
        raise ParameterError(
            f"type {kind} needs an importance matrix of {job.source.name}, as llama-imatrix makes; give one "
            "(imatrix), or choose a larger type"
        )
    if plan.num_fallback:
        logger.warning(
            "%d of %d tensors have rows that the blocks of %s do not divide; llama.cpp gives them the next larger type",
            plan.num_fallback,
            len(plan.tensors),
            kind,
        )


def _check_room(out: Path, num_bytes: int) -> None:
    free = shutil.disk_usage(out.parent).free
    if free < num_bytes:
        raise FileAccessError(
            f"{out} would take {num_bytes / 1e6:.0f} MB, {free / 1e6:.0f} MB are free; free space or write elsewhere"
        )
