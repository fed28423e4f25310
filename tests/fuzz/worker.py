"""A process that draws models and runs them."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from typing import Any

import torch._export.utils as export_utils

from pt2e_quant.kernels.product_trial import verdicts
from pt2e_quant.kernels.product_trial.product import Product
from pt2e_quant.kernels.product_trial.run_in_child import COMMAND, run_in_child
from tests.fuzz.processes import Answerer, Died, Hung, serve
from tests.fuzz.trial import run_trial

LOADER = Answerer("tests.fuzz.loader", retire_after=60)
TRIER = Answerer("tests.fuzz.trier")
TRIAL_LIMIT_S = 20.0


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


def keep_trial_process() -> None:
    """Try oneDNN's products in one process for all models, in place of one for each model.

    To start one takes four times as long as a model.
    """

    def run(products: Sequence[Product], *, command: Sequence[str]) -> Mapping[Product, str]:
        if command is not COMMAND:
            return run_in_child(products, command=command)
        return {product: _reason(product) for product in products}

    verdicts.run_in_child = run


def _reason(product: Product) -> str:
    try:
        return str(TRIER.ask({"key": product.key}, TRIAL_LIMIT_S)["reason"])
    except (Died, Hung) as error:
        return f"oneDNN fails here ({error})"


if __name__ == "__main__":
    keep_trial_process()
    remember_operators()
    serve(handle)
