"""Random text of templates: sections of lines in the files beside this module, with slots that other sections fill."""

from __future__ import annotations

import collections.abc as abc
import re
from importlib import resources

import numpy as np

Sections = dict[str, tuple[str, ...]]

_SLOT = re.compile(r"\{(?:(?P<name>[a-zA-Z_]+)\d*|(?P<low>\d+)-(?P<high>\d+))\}")


def load_sections(*names: str) -> Sections:
    """Of shipped files, by name. A later file's section replaces an earlier one's of the same name."""
    sections: Sections = {}
    for name in names:
        sections |= read_sections(resources.files(__package__).joinpath(name).read_text(encoding="utf-8"))
    return sections


def read_sections(text: str) -> Sections:
    """``[name]`` begins a section, ``#`` a remark; of a line, spaces around it do not count and \\n is a line break."""
    sections: dict[str, list[str]] = {}
    for line in map(str.strip, text.splitlines()):
        if line.startswith("[") and line.endswith("]"):
            lines = sections.setdefault(line[1:-1], [])
        elif line and not line.startswith("#"):
            lines.append(line.replace("\\n", "\n"))
    return {name: tuple(lines) for name, lines in sections.items()}


class Filler:
    """Fills the slots of one text: the same slot gets the same filling in all of its lines.

    given  fillings that are known
    """

    def __init__(
        self, sections: Sections, random: np.random.Generator, given: abc.Mapping[str, str] | None = None
    ) -> None:
        self._sections, self._random = sections, random
        self._filled = dict(given or {})

    def line(self, section: str) -> str:
        """One of the section's, filled. Raises KeyError for a section or slot there is none of."""
        lines = self._sections[section]
        return self.fill(lines[self._random.integers(len(lines))])

    def fill(self, line: str) -> str:
        return _SLOT.sub(self._filling, line)

    def _filling(self, slot: re.Match[str]) -> str:
        key = slot[0][1:-1]
        if key not in self._filled:
            self._filled[key] = self._new(slot)
        return self._filled[key]

    def _new(self, slot: re.Match[str]) -> str:
        """A number, or a line that no other slot of that section got, if there is one."""
        if slot["low"]:
            return str(self._random.integers(int(slot["low"]), int(slot["high"]) + 1))
        for _ in range(8):
            filling = self.line(slot["name"])
            if filling not in self._filled.values():
                break
        return filling
