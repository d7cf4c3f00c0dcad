"""GGUFs that come in several files, as llama.cpp's splitter names them."""

from __future__ import annotations

import re
from pathlib import Path

from edgespec.errors import ParameterError

_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


def parts(path: Path) -> tuple[Path, ...]:
    """All files of a model, named by its first; the path alone where its name is no part's. None need be there.

    Raises ParameterError for a later part.
    """
    split = _NAME.fullmatch(path.name)
    if split is None:
        return (path,)
    stem, count = split["stem"], int(split["count"])
    if int(split["number"]) != 1:
        raise ParameterError(
            f"{path} is a later part of a split model; give its first, {stem}-00001-of-{count:05}.gguf"
        )
    return tuple(path.with_name(f"{stem}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1))
