"""What the toolkit needs and the runtime does without."""

from __future__ import annotations

import importlib.util

from edgespec.errors import MissingDependencyError

_EXTRAS = {"torch": "distill", "matplotlib": "distill"}  # of any other package: quantize


def require(*packages: str) -> None:
    """Raise MissingDependencyError unless all of these can be imported. Imports none of them."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        extra = _EXTRAS.get(missing[0], "quantize")
        raise MissingDependencyError(
            f"edgespec {extra} needs {missing[0]}; get it with: pip install 'edgespec[{extra}]'"
        )
