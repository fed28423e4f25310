"""Pause the cyclic garbage collector while a graph is built."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from pt2e_quant.accelerate.patch import Patch

PATCH = Patch(name="pause_gc", saves="collections of a growing graph in prepare and convert")


@contextmanager
def pause_gc() -> Iterator[None]:
    """No cyclic collection in the block.

    Graph nodes are many small objects that all stay alive: each full collection walks all of
    them and frees nothing, which makes the cost per node grow with the graph.
    """
    was_enabled = gc.isenabled() and PATCH.is_on()
    if not was_enabled:
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
