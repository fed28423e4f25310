"""Pause the cyclic garbage collector while a graph is built, or let it walk what is new only."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from pt2e_quant.accelerate.patch import Patch

PATCH = Patch(
    name="pause_gc",
    saves="collections of a growing graph in prepare and convert, and in a lowering walks over "
    "what was there before; nothing in a lowering right behind a full collection",
)


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


_holders: list[object] = []
"""The block that holds back what there was before it, if there is one."""


@contextmanager
def collect_new() -> Iterator[None]:
    """Cyclic collections in the block walk only what is made there.

    A process in which torch was imported has half a million objects that stay alive. A lowering
    makes and drops copies of graphs and weights in cycles, so they have to be collected.
    """
    # Whoever froze objects keeps them so: unfreezing is of all. Counting them takes a while.
    if _holders or not PATCH.is_on() or gc.get_freeze_count():
        yield
        return
    _holders.append(None)
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        _holders.clear()
