"""Measuring whole pairs. What exists: the device simulator behind ``edgespec bench --simulate``."""
