"""Try products in this process, and the loop of the child that tries them for another."""

import json
import os
import sys
from collections.abc import Iterable, Mapping

from pt2e_quant.kernels.product_trial.product import Product, read_product
from pt2e_quant.kernels.product_trial.try_product import try_product

__all__ = ["run_here", "serve"]


def run_here(products: Iterable[Product]) -> Mapping[Product, str]:
    """What is wrong with each product, by `try_product` on one thread.

    A product that hangs or crashes takes this process with it: `run_in_child` survives those.
    """
    return {product: try_product(product) for product in products}


def serve() -> None:
    """Try the products on standard input, a key a line; report each before and behind it.

    Each is run on one thread and on all of the machine's: oneDNN may divide the work among kernels.
    """
    threads = tuple(sorted({1, os.cpu_count() or 1}))
    for index, line in enumerate(sys.stdin):
        print(json.dumps({"start": index}), flush=True)
        reason = try_product(read_product(line), threads)
        print(json.dumps({"end": index, "reason": reason}), flush=True)
