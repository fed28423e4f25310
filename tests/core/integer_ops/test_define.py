"""Every integer operator of our own: its schema and its fake kernel are those of its kernel."""

import pytest
import torch
from torch.library import opcheck

from pt2e_quant.core import operators  # noqa: F401  (registers them)
from pt2e_quant.core.integer_ops.define import INTEGER_OPS

X = torch.arange(-12, 12, dtype=torch.int16).reshape(2, 3, 4)
INT8 = X.to(torch.int8)
WEIGHT = torch.arange(-10, 10, dtype=torch.int8)[:20].reshape(5, 4)
LIMITS = (3, -128, 127, torch.int8)
ARGUMENTS = {
    "integer_rescale": (
        X.int(), torch.tensor([[1 << 30], [5], [7]]), torch.tensor([[31], [3], [2]]), *LIMITS,
        "tosa_double",
    ),
    "integer_divide": (X.int(), torch.tensor([4, 3, 2, 1])),
    "integer_table": (INT8, torch.arange(256).to(torch.uint8), -128),
    "integer_interpolate": (X, torch.arange(513, dtype=torch.int32), -32768, *LIMITS),
    "integer_softmax": (INT8, -1, 1 << 30, 17, 1 << 19, 11, *LIMITS),
    "integer_log_softmax": (INT8, -1, 1 << 30, 17, 1 << 30, 47, *LIMITS),
    "integer_root": (torch.tensor([[0, 8, 9], [2**40, 1, 3]]),),
    "integer_affine": (INT8, torch.tensor(3 << 20), torch.tensor(5 << 20), 2, 22, *LIMITS),
    "integer_norm": (
        INT8, torch.tensor([1 << 20]), torch.tensor([5]), [-1], None, [4, 2, 12], 1, *LIMITS,
    ),
    "integer_matmul": (X, X.mT, 32),
    "integer_convolution": (X, X[:, :, :2].reshape(2, 3, 2), [2], [1], [1], True, [1], 1, 64),
    "integer_group_linear": (X, WEIGHT, torch.arange(1, 11).reshape(5, 2)),
    "integer_window_sum": (X, 1, [0, 1], [2, 3]),
    "integer_quotient": (X.int(), X[:1], 3 << 20, 21, *LIMITS),
}  # fmt: skip


def test_operators_when_listed_then_every_one_is_checked():
    assert set(ARGUMENTS) == set(INTEGER_OPS)


@pytest.mark.parametrize("name", sorted(ARGUMENTS))
def test_fake_kernel_when_called_then_agrees_with_the_kernel(name):
    arguments = ARGUMENTS[name]
    if name == "integer_convolution":  # transposed: [in, out, kernel]
        arguments = (X, torch.ones(3, 2, 2, dtype=torch.int16), *arguments[2:])
    checks = ("test_schema", "test_faketensor")
    opcheck(INTEGER_OPS[name].overload, arguments, test_utils=checks)
