"""Models in other runtimes: ONNX, for onnxruntime and sherpa-onnx."""

from transduce.export.folder import export_onnx, unlike_sherpa

__all__ = ["export_onnx", "unlike_sherpa"]
