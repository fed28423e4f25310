"""Pause the cyclic garbage collector while a graph is built."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["pause_gc"]


@contextmanager
def pause_gc() -> Iterator[None]:
    """No cyclic collection in the block.

    Graph nodes are many small objects that all stay alive: each full collection walks all of
    them and frees nothing, which makes the cost per node grow with the graph.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
