"""Tests of patches of ExecuTorch and of ONNX's exporter are skipped where these are missing."""

from importlib.util import find_spec

_EXECUTORCH = ["test_share_constants.py"]
_ONNX = ["test_onnx_decompositions.py", "test_onnx_rules.py", "test_onnx_tables.py"]
collect_ignore = [] if find_spec("executorch") else _EXECUTORCH
collect_ignore += [] if find_spec("onnxscript") and find_spec("onnxruntime") else _ONNX
