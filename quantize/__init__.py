"""The offline toolkit: makes draft models, verifiers and pairs. The runtime imports it when a draft is to be built.

Importing it switches off ONNX Runtime's telemetry, unless the user has set it.
"""

import os

from quantize.draft import build_draft

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # read when ONNX Runtime is loaded, which quantize.draft does later

__all__ = ["build_draft"]
