"""The table of torch's ONNX exporter, made once in a process.

torch 2.13 makes the table of all ONNX functions anew in each export, for which onnxscript reads
the source text of several hundred functions. Inside `kept_table` it is made once, and again where
a function was registered since. The file that comes out is the same.
"""

import copy
from contextlib import AbstractContextManager
from typing import Any

from onnxscript.function_libs.torch_lib.registration import default_registry
from torch.onnx._internal.exporter._registration import ONNXRegistry

from pt2e_quant.accelerate.patch import Patch, Replacement, replaced

PATCH = Patch(
    name="onnx_tables",
    saves="a third of the time of lowering a small network to ONNX, but of the first",
    versions={"torch": "2.13", "onnxscript": "0.7"},
)

_made: dict[object, ONNXRegistry] = {}
"""The last table, at what it was made of: arguments, and the functions that were registered."""


def kept_table() -> AbstractContextManager[None]:
    """Keep the table while the block runs; a second thread waits."""
    return replaced(PATCH, _replacements)


def _replacements() -> list[Replacement]:
    make = ONNXRegistry.from_torchlib

    def from_torchlib(cls: Any, *args: Any, **options: Any) -> Any:
        key = (args, tuple(options.items()), _functions())
        if key not in _made:
            _made.clear()
            _made[key] = make(*args, **options)
        # Exports register functions of their own in theirs.
        found = copy.copy(_made[key])
        found.functions = {target: [*of] for target, of in found.functions.items()}
        return found

    return [(ONNXRegistry, "from_torchlib", classmethod(from_torchlib))]


def _functions() -> tuple[object, ...]:
    """All that onnxscript has registered."""
    return tuple((name, *of.overloads, *of.complex) for name, of in default_registry.items())
