"""int8_matmul's definition, held to Python's integers, and its operator."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pt2e_quant.core.errors import InputError
from pt2e_quant.kernels.int8_matmul.batches import read_batches
from pt2e_quant.kernels.int8_matmul.op import Int8Matmul, cost
from pt2e_quant.kernels.int8_matmul.reference import int8_matmul
from tests.kernels.int8_matmul.products import matmul_operands, product_shapes


def by_hand(left, right, scale, left_zero, right_zero, out_scale):
    """Sums in Python's integers; each float step rounded by numpy to float32."""
    made = []
    for row in left.tolist():
        made.append([])
        for column in right.mT.tolist():
            pairs = zip(row, column, strict=True)
            total = sum((a - left_zero) * (b - right_zero) for a, b in pairs)
            step = np.rint(np.float32(total) * np.float32(scale) * np.float32(1.0 / out_scale))
            made[-1].append(int(np.clip(step + 9, -128, 127)))
    return made


def pairs_of(left, right):
    """Each matrix of the result's leading axes, as (left, right)."""
    batches = read_batches(left.shape, right.shape)
    if batches.repeats > 1:
        right = torch.cat([right[..., i : i + 1, :, :].expand(
            *right.shape[:-3], batches.repeats, *right.shape[-2:]
        ) for i in range(right.shape[-3])], dim=-3)  # fmt: skip
    left = left.expand(*batches.shape, *left.shape[-2:])
    right = right.expand(*batches.shape, *right.shape[-2:])
    return zip(left.flatten(0, -3), right.flatten(0, -3), strict=True)


@settings(max_examples=40)
@given(st.data(), product_shapes(most=7), st.sampled_from([0.0001, 0.3, 40.0]))
def test_int8_matmul_when_inputs_are_drawn_then_equals_pythons_integers(data, shapes, out_scale):
    left, right, *rest = data.draw(matmul_operands(*shapes))
    end = {"out_dtype": torch.int8, "out_scale": out_scale, "out_zero_point": 9}
    made = int8_matmul(left, right, *rest, **end)
    if left.dim() == 2 and right.dim() == 2:
        assert made.tolist() == by_hand(left, right, *rest, out_scale)
        return
    wanted = [by_hand(a, b, *rest, out_scale) for a, b in pairs_of(left, right)]
    assert made.flatten(0, -3).tolist() == wanted


@pytest.mark.parametrize("shapes", [((2, 4, 3, 5), (2, 2, 5, 6)), ((3, 5), (5, 2))])
def test_operator_when_checked_by_torch_then_is_whole(shapes):
    left, right = (torch.ones(shape, dtype=torch.int8) for shape in shapes)
    torch.library.opcheck(Int8Matmul, (left, right, 0.1, 3, -2), {"out_dtype": torch.float16})


def test_operator_when_sizes_are_dynamic_then_its_shape_follows():
    class Scores(torch.nn.Module):
        def forward(self, q, k):
            return Int8Matmul(q, k.transpose(-2, -1), 0.1, 0, 0, out_dtype=torch.int8)

    batch, rows = torch.export.Dim("batch"), torch.export.Dim("rows")
    operands = [torch.ones(2, 4, 3, 8, dtype=torch.int8) for _ in range(2)]
    ep = torch.export.export(
        Scores(), tuple(operands), dynamic_shapes=({0: batch, 2: rows}, {0: batch, 2: rows})
    )
    longer = torch.ones(5, 4, 9, 8, dtype=torch.int8)
    assert ep.module()(longer, longer).shape == (5, 4, 9, 9)


@pytest.mark.parametrize("shapes", [((3, 4), (5, 2)), ((4, 3, 4), (3, 4, 2)), ((4,), (4, 2))])
def test_read_batches_when_shapes_do_not_go_together_then_refuses(shapes):
    with pytest.raises(InputError, match="has no product of"):
        read_batches(*shapes)


def test_cost_when_counted_then_has_each_tensor_once():
    left, right = (torch.zeros(s, dtype=torch.int8) for s in ((4, 3, 5), (2, 5, 6)))
    found = cost(left, right, torch.zeros(4, 3, 6))
    assert (found.bytes, found.operations) == (60 + 60 + 288, 2 * 72 * 5)
