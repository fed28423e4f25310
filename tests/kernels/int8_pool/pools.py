"""Pools, drawn: sizes of images and the arguments of the operator."""

import torch.nn.functional as F
from hypothesis import strategies as st
from torch import zeros

__all__ = ["pools"]


@st.composite
def pools(draw):
    """H, W and the arguments from kind to divisor."""
    H, W = draw(st.integers(3, 9)), draw(st.integers(3, 9))
    if draw(st.booleans()):
        out = [draw(st.integers(1, H)), draw(st.integers(1, W))]
        return H, W, ("adaptive", [0, 0], [0, 0], [0, 0], out, True, 0)
    kind = draw(st.sampled_from(["max", "average"]))
    kernel = [draw(st.integers(1, 3)) for _ in range(2)]
    stride = [draw(st.integers(1, 3)) for _ in range(2)]
    padding = [draw(st.integers(0, k // 2)) for k in kernel]
    shape = F.max_pool2d(
        zeros(1, 1, H, W), kernel, stride, padding, ceil_mode=draw(st.booleans())
    ).shape
    divisor = draw(st.sampled_from([0, 0, 5]))
    return H, W, (kind, kernel, stride, padding, list(shape[2:]), draw(st.booleans()), divisor)
