"""What pytest leaves out: doctests of backends whose extra is not installed."""

from importlib.util import find_spec
from pathlib import Path

_NEEDS = {
    "xnnpack": ("executorch",),
    "onnx": ("onnx", "onnxscript", "onnxruntime"),
}

collect_ignore = [
    str(Path("pt2e_quant") / "backends" / backend)
    for backend, packages in _NEEDS.items()
    if any(find_spec(package) is None for package in packages)
]
