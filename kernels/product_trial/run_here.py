"""Try products in this process, and the loop of the child that tries them for another."""

import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence

from pt2e_quant.kernels.product_trial.product import Product, read_product
from pt2e_quant.kernels.product_trial.run_in_child import TIME_COMMAND
from pt2e_quant.kernels.product_trial.time_product import time_product
from pt2e_quant.kernels.product_trial.try_product import try_product

__all__ = ["run_here", "serve", "serve_times"]


def run_here(products: Iterable[Product], *, command: Sequence[str]) -> Mapping[Product, str]:
    """What `run_in_child` gives, without a child: each product is tried on one thread.

    A product that hangs or crashes takes this process with it: `run_in_child` survives those.
    """
    if tuple(command) == TIME_COMMAND:
        return {product: time_product(product).text for product in products}
    return {product: try_product(product) for product in products}


def serve() -> None:
    """Try the products on standard input, a key a line; report each before and behind it.

    Each is run on one thread and on all of the machine's: oneDNN may divide the work among kernels.
    """
    threads = tuple(sorted({1, os.cpu_count() or 1}))
    _report(lambda product: try_product(product, threads))


def serve_times() -> None:
    """Time the products on standard input, in place of trying them."""
    _report(lambda product: time_product(product).text)


def _report(answer: Callable[[Product], str]) -> None:
    for index, line in enumerate(sys.stdin):
        print(json.dumps({"start": index}), flush=True)
        reason = answer(read_product(line))
        print(json.dumps({"end": index, "reason": reason}), flush=True)
