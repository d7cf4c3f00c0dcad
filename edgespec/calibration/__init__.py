"""What rounds cost with one pair on one box: measured once, kept in the user's cache."""

from __future__ import annotations

from edgespec.calibration.key import Key, key_of
from edgespec.calibration.measuring import calibrate, quick
from edgespec.calibration.stored import Calibration, load, store
from edgespec.calibration.usual import Usual, usual

__all__ = ["Calibration", "Key", "Usual", "calibrate", "key_of", "load", "quick", "store", "usual"]
