"""Pairs: which verifier and which draft model belong together. ``models/README.md`` explains the manifests."""

from edgespec.pairs.known import load_pair, load_recipe, manifests, pair_names, what_is_missing
from edgespec.pairs.pair import MANIFEST, Pair, read_pair
from edgespec.pairs.sources import HubVerifier, Progress
from edgespec.pairs.table import NEVER, as_dict

DEFAULT_PAIR = "starter"

__all__ = [
    "DEFAULT_PAIR",
    "MANIFEST",
    "NEVER",
    "HubVerifier",
    "Pair",
    "Progress",
    "as_dict",
    "load_pair",
    "load_recipe",
    "manifests",
    "pair_names",
    "read_pair",
    "what_is_missing",
]
