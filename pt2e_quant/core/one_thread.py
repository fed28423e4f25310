"""Torch on one thread.

Sums are then added in one order, whatever the machine. Many small operators in a row are also
faster so: each would end in a barrier of all threads, which costs milliseconds where another
process holds one of the cores.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_thread() -> Iterator[None]:
    """Run the block on one thread of torch, and set the number there was again behind it."""
    before = torch.get_num_threads()
    if before == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
