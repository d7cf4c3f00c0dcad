"""The offline toolkit: builds ONNX draft models. The runtime imports it only to build the starter draft, and lazily.

Importing it switches off ONNX Runtime's telemetry, unless the user has set it.
"""

import os

from quantize.draft import build_draft

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # read when ONNX Runtime is loaded, which quantize.draft does later

__all__ = ["build_draft"]
