"""GGUF files made of others: with other metadata, or in several parts."""

from __future__ import annotations

import collections.abc as abc
from pathlib import Path
from typing import Any

import gguf


def copy_gguf(source: Path, target: Path, **fields: Any) -> Path:
    """The same with more metadata; ``__`` stands for a dot."""
    opened = gguf.GGUFReader(source)
    _write(target, opened, opened.tensors, {name.replace("__", "."): value for name, value in fields.items()})
    return target


def split_gguf(source: Path, folder: Path, name: str = "part") -> list[Path]:
    """The same as two files, as llama.cpp's splitter names them."""
    opened = gguf.GGUFReader(source)
    middle, paths = len(opened.tensors) // 2, [folder / f"{name}-0000{number}-of-00002.gguf" for number in (1, 2)]
    for number, tensors in enumerate((opened.tensors[:middle], opened.tensors[middle:])):
        counts = {"split.no": number, "split.count": 2, "split.tensors.count": len(opened.tensors)}
        _write(paths[number], opened if number == 0 else None, tensors, counts)
    return paths


def _write(
    path: Path, metadata: gguf.GGUFReader | None, tensors: abc.Iterable[Any], fields: abc.Mapping[str, Any]
) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    for name, field in () if metadata is None else metadata.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            sub_type = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], sub_type)
    for name, value in fields.items():
        if isinstance(value, str):
            writer.add_string(name, value)
        elif name == "split.tensors.count":
            writer.add_int32(name, value)
        else:
            writer.add_uint16(name, value)
    for tensor in tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
