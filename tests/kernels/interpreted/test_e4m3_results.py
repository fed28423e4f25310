"""Results in float8_e4m3fn in Triton's interpreter, held to their definitions."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pt2e_quant.core.errors import ConfigError, InputError
from pt2e_quant.kernels.fp8_linear import reference as fp8
from pt2e_quant.kernels.fp8_linear.gpu import fp8_linear
from pt2e_quant.kernels.norm_quantize import reference as norm_reference
from pt2e_quant.kernels.norm_quantize.gpu import norm_quantize, norm_quantize_per_token_e4m3
from pt2e_quant.kernels.norm_quantize.op import NormQuantize, NormQuantizePerTokenE4m3
from pt2e_quant.kernels.quantize.gpu import quantize
from pt2e_quant.kernels.quantize.op import Quantize
from pt2e_quant.kernels.quantize.reference import quantize as quantize_reference
from pt2e_quant.kernels.quantize_per_token.gpu import quantize_per_token_e4m3
from pt2e_quant.kernels.quantize_per_token.op import QuantizeRowsE4m3
from pt2e_quant.kernels.quantize_per_token.reference import quantize_per_token_e4m3 as rows
from pt2e_quant.kernels.tiles import TileConfig
from tests.kernels.e4m3_values import (
    assert_codes_of_activation,
    assert_near_codes,
    hard_values,
    same_codes,
)
from tests.kernels.fp8_operands import fp8_operands
from tests.kernels.norm_quantize.norms import norms
from tests.kernels.operands import EXACT_ACTIVATIONS, float_rows, outputs

E4M3 = torch.float8_e4m3fn
ELEMENTS = TileConfig((("BLOCK", 64),), num_warps=4, num_stages=1)
ROWS = TileConfig((("BLOCK_M", 4), ("BLOCK_K", 16)), num_warps=4, num_stages=1)
WHOLE_ROWS = TileConfig((("BLOCK_M", 4), ("BLOCK_K", 64)), num_warps=4, num_stages=1)
# numpy warns of what a GPU does in silence.
extreme = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
SCALES = st.sampled_from([1.0, 0.3, 7e-6, 2.0**-126, 3e30])


@extreme
@settings(max_examples=5)
@given(SCALES)
def test_quantize_when_values_are_hard_to_round_then_is_right_to_the_last_bit(scale):
    for x in (hard_values(), hard_values() * scale):
        named = {"out_dtype": E4M3, "out_scale": scale}
        assert same_codes(quantize(x, tiles=ELEMENTS, **named), quantize_reference(x, **named))


@extreme
@settings(max_examples=25)
@given(st.data(), st.integers(1, 200))
def test_quantize_when_inputs_are_drawn_then_equals_the_definition(data, size):
    x = data.draw(float_rows((size,)))
    drawn = data.draw(outputs())
    named = {n: drawn[n] for n in ("activation", "limits") if n in drawn}
    named |= {"out_dtype": E4M3, "out_scale": data.draw(SCALES)}
    made, wanted = quantize(x, tiles=ELEMENTS, **named), quantize_reference(x, **named)
    if named["activation"] in EXACT_ACTIVATIONS:
        assert same_codes(made, wanted, either_zero=named["activation"] in ("relu", "clamp"))
    else:
        for codes in (made, wanted):
            assert_codes_of_activation(codes, x, named["activation"], named["out_scale"])


@settings(max_examples=25)
@given(st.data(), st.integers(1, 9), st.integers(1, 50))
def test_quantize_rows_when_shapes_are_ragged_then_equals_the_definition(data, M, K):
    x = data.draw(float_rows((M, K)))
    (codes, scale), (wanted, wanted_scale) = quantize_per_token_e4m3(x, tiles=ROWS), rows(x)
    assert torch.equal(scale, wanted_scale)
    assert same_codes(codes, wanted)


@extreme
@pytest.mark.parametrize("block_k", [16, 64])
def test_quantize_rows_when_values_are_extreme_then_equals_the_definition(block_k):
    x = torch.zeros(6, 40)
    x[0, 3], x[1, 39], x[2, 17], x[2, 0] = torch.inf, torch.nan, torch.nan, -torch.inf
    x[3, 1], x[3, 2], x[4, 5] = 3e38, -3e38, 2.0**-149
    tiles = TileConfig((("BLOCK_M", 4), ("BLOCK_K", block_k)), num_warps=4, num_stages=1)
    (codes, scale), (wanted, wanted_scale) = quantize_per_token_e4m3(x, tiles=tiles), rows(x)
    torch.testing.assert_close(scale, wanted_scale, rtol=0, atol=0, equal_nan=True)
    assert same_codes(codes, wanted)


def test_quantize_rows_when_tiles_are_the_shipped_ones_then_equals_the_definition():
    generator = torch.Generator().manual_seed(0)
    for K in (65, 1025, 8200):
        x = torch.randn(2, 3, K, generator=generator).bfloat16()
        (codes, scale), (wanted, wanted_scale) = QuantizeRowsE4m3(x), rows(x)
        assert torch.equal(scale, wanted_scale)
        assert same_codes(codes, wanted)


@settings(max_examples=15)
@given(st.data(), st.integers(1, 9), st.integers(1, 60))
def test_norms_when_inputs_are_drawn_then_are_within_a_code_of_the_definition(data, M, K):
    x, norm = data.draw(float_rows((M, K))), data.draw(norms(K))
    end = {"out_dtype": E4M3, "out_scale": 0.013}
    made = norm_quantize(x, **norm, **end, tiles=WHOLE_ROWS)
    assert_near_codes(made, norm_reference.norm_quantize(x, **norm, **end))
    codes, scale = norm_quantize_per_token_e4m3(x, **norm, tiles=WHOLE_ROWS)
    wanted, wanted_scale = norm_reference.norm_quantize_per_token_e4m3(x, **norm)
    # A last bit of bfloat16 in a row's greatest is 2**-8 of its scale.
    torch.testing.assert_close(scale, wanted_scale, rtol=2**-7, atol=0.0)
    real, wanted_real = codes.float() * scale, wanted.float() * wanted_scale
    # Half a step of three bits on either side, and the scale's and values' own difference.
    bound = wanted_real.abs() * (2**-3 + 2**-6) + wanted_scale * 2**-9
    assert ((real - wanted_real).abs() <= bound).all()


def test_norms_when_tiles_are_the_shipped_ones_then_are_within_a_code_of_the_definition():
    generator = torch.Generator().manual_seed(0)
    for K in (100, 4000, 6000):
        x = torch.randn(2, 3, K, generator=generator).half()
        end = {"out_dtype": E4M3, "out_scale": 0.01}
        made = NormQuantize(x, "layer", None, None, **end)
        assert_near_codes(made, norm_reference.norm_quantize(x, "layer", **end))
        codes, scale = NormQuantizePerTokenE4m3(x, "rms")
        wanted, wanted_scale = norm_reference.norm_quantize_per_token_e4m3(x, "rms")
        torch.testing.assert_close(scale, wanted_scale, rtol=2**-22, atol=0.0)
        assert_near_codes(codes, wanted)


@settings(max_examples=15)
@given(
    st.data(), st.integers(1, 20), st.integers(1, 20), st.integers(1, 300), st.sampled_from([1, 3])
)
def test_products_when_inputs_are_drawn_then_are_within_a_code_of_the_definition(
    data, M, N, K, splits
):
    operands = data.draw(fp8_operands(M, N, K))
    blocks = {"BLOCK_M": 16, "BLOCK_N": 16, "BLOCK_K": 32, "GROUP_M": 2, "SPLIT_K": splits}
    tiles = TileConfig(tuple(blocks.items()), num_warps=4, num_stages=2)
    end = {"bias": torch.linspace(-1, 1, N), "activation": "relu", "out_dtype": E4M3}
    end["out_scale"] = data.draw(st.sampled_from([0.02, 4.0]))
    made = fp8_linear(*operands, tiles=tiles, **end).float() * end["out_scale"]
    floats = fp8.fp8_linear(*operands, **{**end, "out_dtype": torch.float32})
    bound = fp8.error_bound(*operands, splits=splits, run_error=fp8.RUN * 2.0**-24)
    limit = 448 * end["out_scale"]
    error = (made - floats.clamp(-limit, limit)).double().abs()
    # A half of the last of three bits, or of the least subnormal number.
    half_step = floats.abs().clamp(max=limit) * 2**-4 + end["out_scale"] * 2**-10
    assert (error <= bound + half_step * (1 + 2**-20) + 2**-22).all()


def test_products_and_elements_when_tiles_are_the_shipped_ones_then_hold_to_the_definition():
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(70, 256, generator=generator).to(E4M3)
    for M in (1, 33):
        x = torch.randn(M, 256, generator=generator).to(E4M3)
        operands = (x, torch.full((M,), 0.1), weight, torch.full((70,), 0.1))
        end = {"out_dtype": E4M3, "out_scale": 0.05}
        assert_near_codes(fp8_linear(*operands, **end), fp8.fp8_linear(*operands, **end))
    strided = torch.randn(2, 8, 6, 10, generator=generator)[:, :, :, ::3]
    end["activation"] = "relu"
    assert same_codes(Quantize(strided, **end), quantize_reference(strided, **end))


def test_launchers_when_given_what_they_cannot_do_then_refuse():
    with pytest.raises(InputError, match="at least one element"):
        quantize_per_token_e4m3(torch.zeros(2, 0))
    with pytest.raises(ConfigError, match="scale of a result must be positive"):
        quantize(torch.zeros(2), out_dtype=E4M3, out_scale=0.0)


def test_launchers_when_there_is_nothing_then_give_nothing():
    codes, scale = quantize_per_token_e4m3(torch.zeros(0, 4))
    assert (codes.shape, scale.shape, codes.dtype) == ((0, 4), (0, 1), E4M3)
    assert norm_quantize_per_token_e4m3(torch.zeros(0, 4), "rms")[0].shape == (0, 4)
    assert quantize(torch.zeros(0, 3), out_dtype=E4M3).dtype is E4M3
