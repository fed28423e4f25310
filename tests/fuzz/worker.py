"""A process that draws models and runs them."""

import functools
from dataclasses import asdict
from importlib.util import find_spec
from typing import Any

import torch._export.utils as export_utils

from tests.fuzz.processes import Answerer, serve
from tests.fuzz.trial import run_trial

LOADER = Answerer("tests.fuzz.loader", retire_after=60)


def handle(request: dict[str, Any]) -> dict[str, Any]:
    """Run the file `source`."""
    return asdict(run_trial(request["source"], LOADER))


def remember_operators() -> None:
    """List torch's operators and parse torch.onnx's functions once, not for each model.

    It is a third of the time that a small model takes.
    """
    export_utils._materialize_cpp_cia_ops = functools.cache(export_utils._materialize_cpp_cia_ops)
    if find_spec("onnxscript") is None:
        return
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    load = functools.cache(ONNXRegistry.from_torchlib)

    def from_torchlib(opset_version: int = 18) -> ONNXRegistry:
        known, registry = load(opset_version), ONNXRegistry()
        registry._opset_version = known.opset_version
        registry.functions = {name: [*functions] for name, functions in known.functions.items()}
        return registry

    ONNXRegistry.from_torchlib = staticmethod(from_torchlib)


if __name__ == "__main__":
    remember_operators()
    serve(handle)
