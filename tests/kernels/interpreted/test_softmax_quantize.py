"""softmax_quantize in Triton's interpreter, held to its definition."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pt2e_quant.core.errors import InputError
from pt2e_quant.kernels.softmax_quantize.gpu import softmax_quantize
from pt2e_quant.kernels.softmax_quantize.op import SoftmaxQuantize
from pt2e_quant.kernels.softmax_quantize.reference import softmax_quantize as reference
from pt2e_quant.kernels.tiles import TileConfig
from tests.kernels.operands import FLOATS, float_rows

SMALL = TileConfig((("BLOCK_M", 4), ("BLOCK_K", 32)), num_warps=4, num_stages=1)


@settings(max_examples=50)
@given(
    st.data(),
    st.sampled_from([(2, 3, 5), (3, 5), (5,), ()]),
    st.integers(1, 32),
    st.sampled_from(["none", "whole", "key", "query", "one"]),
)
def test_softmax_quantize_when_inputs_are_drawn_then_is_within_a_step_of_the_definition(
    data, leading, K, kind
):
    x = data.draw(float_rows((*leading, K)))
    shapes = {"whole": (*leading, K), "key": (K,), "query": (*leading[-1:], K), "one": (1,)}
    mask = None
    if kind != "none":
        mask = torch.zeros(shapes[kind], dtype=data.draw(st.sampled_from(FLOATS)))
        mask[..., K // 2 + 1 :] = torch.finfo(mask.dtype).min
    named = {
        "scale": data.draw(st.sampled_from([1.0, 0.125])),
        "value_dtype": data.draw(st.sampled_from(FLOATS)),
        "out_zero_point": data.draw(st.sampled_from([-128, 0])),
    }
    made = softmax_quantize(x, mask, **named, tiles=SMALL)
    wanted = reference(x, mask, **named)
    assert (made.int() - wanted.int()).abs().max() <= 1


def test_softmax_quantize_when_tiles_are_the_shipped_ones_then_is_within_a_step_of_the_definition():
    generator = torch.Generator().manual_seed(0)
    for K in (100, 600, 2000, 5000):
        x = torch.randn(2, 2, 3, K, generator=generator) * 4
        mask = torch.zeros(1, 1, 3, K).masked_fill(torch.arange(K) > 90, float("-inf"))
        difference = SoftmaxQuantize(x, mask, 0.5).int() - reference(x, mask, 0.5).int()
        assert difference.abs().max() <= 1
        assert difference.abs().float().mean() < 1e-3


def test_softmax_quantize_when_given_what_it_cannot_hold_then_refuses():
    with pytest.raises(InputError, match="rows of 1 to 16384 scores"):
        softmax_quantize(torch.zeros(1, 16385))
    with pytest.raises(InputError, match=r"broadcasts to the scores' \(2, 3\), found \(2,\)"):
        softmax_quantize(torch.zeros(2, 3), torch.zeros(2))
    with pytest.raises(InputError, match="takes mask in"):
        softmax_quantize(torch.zeros(2, 3), torch.zeros(3).bool())


def test_softmax_quantize_when_there_is_nothing_then_gives_nothing():
    assert softmax_quantize(torch.zeros(0, 3)).shape == (0, 3)
