"""embedding_gather in Triton's interpreter, held to its definition."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pt2e_quant.core.errors import InputError
from pt2e_quant.core.packing import pack
from pt2e_quant.kernels.embedding_gather.gpu import embedding_gather
from pt2e_quant.kernels.embedding_gather.op import EmbeddingGather
from pt2e_quant.kernels.embedding_gather.reference import embedding_gather as reference
from pt2e_quant.kernels.tiles import TileConfig
from tests.kernels.embedding_gather.tables import tables

SMALL = TileConfig((("BLOCK_M", 2), ("BLOCK_K", 16)), num_warps=4, num_stages=1)
OUTPUTS = (
    {},
    {"out_dtype": torch.float16},
    {"out_dtype": torch.int8, "out_scale": 0.3, "out_zero_point": -9},
)


@settings(max_examples=50)
@given(tables(), st.sampled_from(OUTPUTS))
def test_embedding_gather_when_inputs_are_drawn_then_equals_the_definition(drawn, output):
    arguments, _ = drawn
    made = embedding_gather(*arguments, tiles=SMALL, **output)
    assert torch.equal(made, reference(*arguments, **output))


def test_embedding_gather_when_tiles_are_the_shipped_ones_then_equals_the_definition():
    for K in (64, 768, 3000, 5000):
        codes = torch.randint(-8, 8, (20, K), dtype=torch.int8)
        indices = torch.randint(0, 20, (2, 3))
        for arguments in (
            (codes, torch.rand(20, 1), None, indices, K),
            (pack(codes, torch.int4), torch.rand(20, 4), None, indices.int(), K, 4),
        ):
            assert torch.equal(EmbeddingGather(*arguments), reference(*arguments))


def test_embedding_gather_when_an_index_is_outside_then_gives_nan_there_alone():
    table, scale = torch.ones(3, 4, dtype=torch.int8), torch.ones(3, 1)
    made = embedding_gather(table, scale, None, torch.tensor([1, 3, -1, 10**12]), 4)
    assert made[0].tolist() == [1.0] * 4
    assert bool(made[1:].isnan().all())


def test_embedding_gather_when_dtypes_are_others_then_refuses():
    table, scale = torch.ones(3, 4, dtype=torch.int8), torch.ones(3, 1)
    with pytest.raises(InputError, match=r"takes indices in torch.int64 or torch.int32"):
        embedding_gather(table, scale, None, torch.tensor([1.0]), 4)


def test_embedding_gather_when_there_is_nothing_then_gives_nothing():
    table, scale = torch.ones(3, 4, dtype=torch.int8), torch.ones(3, 1)
    assert embedding_gather(table, scale, None, torch.zeros(0, 2).long(), 4).shape == (0, 2, 4)
