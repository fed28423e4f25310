"""Detection of a second forward pass, which activation checkpointing runs."""

import torch


def is_recomputing() -> bool:
    """True if a backward pass runs this code: `torch.utils.checkpoint` computes values again.

    A forward pass that is run again must give what it gave, so that statistics do not move in it.
    False in a graph that is compiled.

    >>> is_recomputing()
    False
    """
    if torch.compiler.is_compiling():
        return False
    # As torch.utils.checkpoint tells one backward pass from another; -1 outside of all.
    return torch._C._current_graph_task_id() != -1
