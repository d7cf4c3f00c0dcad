"""The real command in this process, and what is asked of its answers."""

from __future__ import annotations

import collections.abc as abc
import sys
from pathlib import Path

import pytest

from edgespec.cli import main as entry

Result = tuple[int, str, str]
Command = abc.Callable[..., Result]


def run_command(patch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> Result:
    """``edgespec ARGUMENTS``: exit code, standard output, standard error."""
    patch.setattr(sys, "argv", ["edgespec", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        entry.main()
    code = ended.value.code
    out, err = capsys.readouterr()
    return (code if isinstance(code, int) else 0 if code is None else 1), out, err


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def only_error(result: Result) -> str:
    """A failure's one line, without those that say how far it came."""
    code, out, err = result
    lines = [line for line in err.splitlines() if line.startswith("Error: ")]
    assert code != 0
    assert out == ""
    assert len(lines) == 1
    assert err.splitlines()[-1] == lines[0]
    assert "Traceback" not in err
    return lines[0]
