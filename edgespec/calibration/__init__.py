"""What rounds cost with one pair on one box: measured once, kept in the user's cache."""

from __future__ import annotations

from edgespec.calibration.key import Key, key_of
from edgespec.calibration.measuring import calibrate, quick
from edgespec.calibration.stored import Calibration, load, store

__all__ = ["Calibration", "Key", "calibrate", "key_of", "load", "quick", "store"]
