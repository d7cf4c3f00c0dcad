"""Reading a model's small files, with errors that say what to do."""

from __future__ import annotations

from pathlib import Path

from edgespec.errors import EdgespecError, FileAccessError, ModelFormatError, ModelNotFoundError


def unreadable(path: Path, error: OSError) -> EdgespecError:
    """What to raise: ModelNotFoundError for a file that is not there, else FileAccessError."""
    if isinstance(error, FileNotFoundError):
        return ModelNotFoundError(f"{path} does not exist; check the path, or get the draft model again")
    return FileAccessError(f"{path} cannot be read: {error.strerror or error}; check what it is and its permissions")


def read_text(path: Path) -> str:
    """A UTF-8 file's content. Raises ModelNotFoundError, FileAccessError or ModelFormatError."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise unreadable(path, error) from error
    except UnicodeDecodeError as error:
        raise ModelFormatError(f"{path} is not UTF-8 text ({error.reason}); get the draft model again") from error
