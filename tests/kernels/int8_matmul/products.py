"""Products of two int8 tensors, drawn: batches that broadcast, grouped heads, any strides."""

from hypothesis import strategies as st

from tests.kernels.operands import integers

__all__ = ["matmul_operands", "product_shapes"]

BATCHES = [
    ((), ()),
    ((3,), (3,)),
    ((2, 4), (2, 4)),
    ((2, 6), (2, 2)),
    ((2, 4), (1, 1)),
    ((1, 3), (2, 3)),
    ((3,), ()),
    ((2, 1, 4), (2, 3, 2)),
]


@st.composite
def product_shapes(draw, most=40):
    """(left, right) shapes."""
    a, b = draw(st.sampled_from(BATCHES))
    M, N, K = (draw(st.integers(1, most)) for _ in range(3))
    return (*a, M, K), (*b, K, N)


def laid(tensor, is_transposed):
    """The same values with rows or columns contiguous."""
    return tensor.mT.contiguous().mT if is_transposed else tensor


@st.composite
def matmul_operands(draw, left, right):
    """The arguments of int8_matmul before its epilogue."""
    return (
        laid(draw(integers(left)), draw(st.booleans())),
        laid(draw(integers(right)), draw(st.booleans())),
        draw(st.sampled_from([3e-6, 0.002])),
        draw(st.sampled_from([-128, 0, 5, 127])),
        draw(st.sampled_from([-128, 0, -7, 127])),
    )
