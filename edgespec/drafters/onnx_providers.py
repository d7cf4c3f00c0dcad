"""What ONNX Runtime says it can run on here, without a model."""

from __future__ import annotations

from edgespec.errors import MissingDependencyError

CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"


def providers() -> tuple[str, ...]:
    """Their names, the fastest first. The GPU build lists CUDA on any box: whether it works shows when it is used.

    Raises MissingDependencyError where it is not installed or does not load.
    """
    try:
        import onnxruntime
    except (ImportError, OSError) as error:
        raise MissingDependencyError(
            f"ONNX Runtime does not load: {error}; get it with: pip install onnxruntime"
        ) from error
    return tuple(onnxruntime.get_available_providers())
