"""The offline toolkit: builds ONNX draft models. The runtime imports it only to build the starter draft, and lazily."""

from quantize.draft import build_draft

__all__ = ["build_draft"]
