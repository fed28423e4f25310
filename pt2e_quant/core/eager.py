"""Whether a computation runs now, or is recorded into a graph."""

import torch
from torch import Tensor


def is_eager(x: Tensor) -> bool:
    """True for a plain tensor that no compiler, exporter or tracer follows.

    Code may then write into tensors that it has just made. In a graph such a write would be an
    operator that mutates; compilers fuse what is written out of place.
    """
    return (
        type(x) is Tensor
        and not torch.compiler.is_compiling()
        and not torch._C._len_torch_dispatch_stack()
    )
