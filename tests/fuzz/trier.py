"""A process that tries oneDNN's products, for many models one after another."""

import os
from typing import Any

from pt2e_quant.kernels.product_trial.product import read_product
from pt2e_quant.kernels.product_trial.run_here import try_product
from tests.fuzz.processes import serve

THREADS = tuple(sorted({1, os.cpu_count() or 1}))


def handle(request: dict[str, Any]) -> dict[str, Any]:
    """Try the product of a `key`, as `run_here.serve` does."""
    return {"reason": try_product(read_product(request["key"]), THREADS)}


if __name__ == "__main__":
    serve(handle)
