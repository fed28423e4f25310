"""embedding_gather's definition, its operator, and where a lookup becomes one call."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from pt2e_quant.core.errors import ConfigError
from pt2e_quant.core.packing import pack
from pt2e_quant.core.qdq import DequantizePerChannel, DequantizePerGroup
from pt2e_quant.core.unpack_op import Unpack
from pt2e_quant.kernels.embedding_gather.op import KERNELS, EmbeddingGather, cost
from pt2e_quant.kernels.embedding_gather.reference import embedding_gather
from tests.kernels.embedding_gather.tables import tables
from tests.kernels.lowering import calls_of, captured, fuse, qdq


@settings(max_examples=60)
@given(tables())
def test_embedding_gather_when_inputs_are_drawn_then_equals_numpys_float32(drawn):
    (table, scale, zero_point, indices, K, bits, is_signed), codes = drawn
    made = embedding_gather(table, scale, zero_point, indices, K, bits, is_signed)
    group = K // scale.shape[1]
    steps = codes.numpy().astype(np.int32)
    if zero_point is not None:
        steps = steps - zero_point.numpy().repeat(group, 1)
    values = steps.astype(np.float32) * scale.numpy().repeat(group, 1)
    assert made.tolist() == values[indices.numpy()].tolist()


def test_operator_when_checked_by_torch_then_is_whole_and_says_what_it_refuses():
    table, scale = torch.randint(-128, 128, (6, 8), dtype=torch.int8), torch.rand(6, 2)
    indices = torch.tensor([[0, 5], [3, 3]])
    named = {"out_dtype": torch.bfloat16}
    torch.library.opcheck(EmbeddingGather, (table, scale, None, indices, 8), named)
    with pytest.raises(IndexError, match="outside of a table of 6 rows"):
        embedding_gather(table, scale, None, indices + 1, 8)
    with pytest.raises(ConfigError, match="8 or 4 bits, found 2"):
        embedding_gather(table, scale, None, indices, 8, 2)


def test_cost_when_few_rows_are_looked_up_then_counts_those_rows_alone():
    table, scale = torch.zeros(1000, 8, dtype=torch.int8), torch.zeros(1000, 1)
    assert cost(table, scale, torch.zeros(3).long(), torch.zeros(3, 8)).bytes == 24 + 96 + 3 * 12


class Bytes(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.register_buffer("table", torch.randint(-127, 128, (10, 64), dtype=torch.int8))
        self.register_buffer("scale", torch.rand(10))
        self.register_buffer("zero_point", torch.zeros(10, dtype=torch.int64))

    def rows(self):
        return DequantizePerChannel(
            self.table, self.scale, self.zero_point, 0, -127, 127, torch.int8
        )

    def forward(self, indices):
        return F.embedding(indices, self.rows())


class Affine(Bytes):
    def __init__(self):
        super().__init__()
        self.zero_point.random_(-128, 127)


class Nibbles(Bytes):
    def __init__(self):
        super().__init__()
        self.table = pack(self.table >> 4, torch.int4)
        self.scale = torch.rand(10, 2)
        self.zero_point = torch.randint(-8, 8, (10, 2))

    def rows(self):
        codes = Unpack(self.table, 4, True, [10, 64])
        return DequantizePerGroup(
            codes, self.scale, self.zero_point, -8, 7, torch.int8, 32, torch.float32
        )


class Quantized(Bytes):
    def forward(self, indices):
        return qdq(super().forward(indices), 0.7, 3)


@pytest.mark.parametrize("model", [Bytes, Affine, Nibbles, Quantized])
def test_lookup_when_its_table_is_quantized_then_is_one_call_and_equal(model):
    indices = torch.tensor([[0, 9, 3], [3, 3, 1]])
    gm = captured(model(), indices)
    wanted = gm(indices)
    fuse(gm, KERNELS)
    assert calls_of(gm) == ["embedding_gather"]
    assert torch.equal(gm(indices), wanted)


def test_lookup_when_its_table_is_float_then_stays():
    gm = captured(nn.Embedding(5, 8), torch.tensor([1]))
    assert calls_of(fuse(gm, KERNELS)) == []


STATED = st.sampled_from([torch.float16, torch.bfloat16])


@given(STATED)
def test_embedding_gather_when_the_result_is_narrow_then_rounds_once(dtype):
    table, scale = torch.tensor([[127]], dtype=torch.int8), torch.tensor([[0.0123]])
    made = embedding_gather(table, scale, None, torch.tensor(0), 1, out_dtype=dtype)
    assert made.item() == (127 * scale[0, 0]).to(dtype).item()
