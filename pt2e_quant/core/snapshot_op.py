"""A copy that torch.compile keeps for the backward pass, of a buffer that the forward writes later.

The partitioner of AOTAutograd makes cheap values anew in the backward pass, of the buffers as
they are by then (torch 2.13): what depends on running statistics from before the batch would come
out as if it had come after. An operator that it does not know it keeps the result of.
"""

import torch
from torch import Tensor


@torch.library.custom_op("pt2e_quant::snapshot", mutates_args=())
def snapshot(value: Tensor) -> Tensor:
    """The value as it is now."""
    return value.clone()


@snapshot.register_fake
def _fake_snapshot(value: Tensor) -> Tensor:
    return torch.empty_like(value)
