"""norm_quantize in Triton's interpreter, held to its definition."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pt2e_quant.core.errors import ConfigError, InputError
from pt2e_quant.kernels.norm_quantize.gpu import norm_quantize, norm_quantize_per_token
from pt2e_quant.kernels.norm_quantize.op import NormQuantize, NormQuantizePerToken
from pt2e_quant.kernels.norm_quantize.reference import norm_quantize as reference
from pt2e_quant.kernels.norm_quantize.reference import (
    norm_quantize_per_token as reference_per_token,
)
from pt2e_quant.kernels.tiles import TileConfig
from tests.kernels.norm_quantize.norms import assert_same_values, norms
from tests.kernels.operands import float_rows

SMALL = TileConfig((("BLOCK_M", 4), ("BLOCK_K", 64)), num_warps=4, num_stages=1)


@settings(max_examples=50)
@given(st.data(), st.integers(1, 9), st.integers(1, 60), st.sampled_from([0, -128, 19]))
def test_norm_quantize_when_static_then_is_within_a_step_of_the_definition(data, M, K, zero_point):
    x, norm = data.draw(float_rows((M, K))), data.draw(norms(K))
    output = {"out_scale": 0.037, "out_zero_point": zero_point, "out_min": -127}
    made = norm_quantize(x, **norm, **output, tiles=SMALL)
    wanted = reference(x, **norm, **output)
    assert (made.int() - wanted.int()).abs().max() <= 1


@settings(max_examples=50)
@given(st.data(), st.integers(1, 9), st.integers(1, 60))
def test_norm_quantize_when_per_token_then_is_within_a_step_of_the_definition(data, M, K):
    x, norm = data.draw(float_rows((M, K))), data.draw(norms(K))
    assert_same_values(
        norm_quantize_per_token(x, **norm, tiles=SMALL), reference_per_token(x, **norm)
    )


def test_norm_quantize_when_tiles_are_the_shipped_ones_then_is_within_a_step_of_the_definition():
    generator = torch.Generator().manual_seed(0)
    for K in (100, 768, 4000, 6000):
        x = torch.randn(2, 3, K, generator=generator)
        weight = torch.rand(K, generator=generator) + 0.5
        for kind in ("layer", "rms"):
            made = NormQuantize(x, kind, weight, out_scale=0.03)
            wanted = reference(x, kind, weight, out_scale=0.03)
            difference = (made.int() - wanted.int()).abs()
            assert difference.max() <= 1
            assert difference.float().mean() < 1e-3
            assert_same_values(
                NormQuantizePerToken(x, kind, weight), reference_per_token(x, kind, weight)
            )


def test_norm_quantize_when_given_what_it_cannot_hold_then_refuses():
    with pytest.raises(InputError, match="rows of 1 to 16384 elements"):
        norm_quantize(torch.zeros(1, 16385), "rms")
    with pytest.raises(InputError, match=r"takes weight in .*, found torch.float64"):
        norm_quantize(torch.zeros(1, 4), "rms", torch.ones(4).double())
    with pytest.raises(ConfigError, match='layer or rms, found "group"'):
        norm_quantize(torch.zeros(1, 4), "group")


def test_norm_quantize_when_there_are_no_rows_then_gives_nothing():
    assert norm_quantize(torch.zeros(0, 4), "rms").shape == (0, 4)
    assert norm_quantize_per_token(torch.zeros(0, 4), "rms")[1].shape == (0, 1)
