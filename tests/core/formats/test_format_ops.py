"""The operators of pt2e_quant for what quantized_decomposed cannot say."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import pt2e_quant.core.qdq  # noqa: F401  (registers quantized_decomposed)
from pt2e_quant.core.errors import ConfigError
from pt2e_quant.core.formats import format_ops as ops
from pt2e_quant.core.formats.blocks import WHOLE, grid_shape, spread, to_rows
from pt2e_quant.core.formats.code_books import fit_tables
from pt2e_quant.core.formats.number_formats import FLOAT_FORMATS, FP4_E2M1, FP8_E4M3, NF4

E8M0 = torch.float8_e8m0fnu
FLOAT8 = (E8M0, torch.float8_e4m3fn, torch.float8_e5m2)
SCALES = [torch.float32, torch.float16, torch.bfloat16, E8M0, torch.float8_e4m3fn]


@st.composite
def tensors_and_blocks(draw):
    shape = draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    block = [draw(st.sampled_from([WHOLE, 1, 2, 4])) for _ in shape]
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    return torch.randn(shape, generator=generator), block


@given(case=tensors_and_blocks(), form=st.sampled_from(list(FLOAT_FORMATS.values())))
@pytest.mark.parametrize("dtype", SCALES, ids=str)
def test_floats_when_quantized_with_chosen_scales_then_within_half_a_step(dtype, case, form):
    x, block = case
    scales = ops.ChooseScales(x, None, block, form.max, dtype)
    assert scales.shape == grid_shape(x.shape, block)
    codes = ops.QuantizeFloat(x, scales, None, block, form.name)
    assert codes.dtype == form.storage
    back = ops.DequantizeFloat(codes, scales, None, block, form.name)
    scale = spread(scales.float(), x.shape, block).expand_as(x)
    inside = x.abs() <= form.max * scale
    # Half a unit in the last place of a normal number, or of the least one; one more rounding
    # of float32 in the quotient and in the product.
    step = torch.maximum(x.abs(), 2.0**form.min_exponent * scale) * 2.0**-form.mantissa_bits / 2
    assert bool(((back - x).abs() <= step * (1 + 1e-5))[inside].all())
    beyond = x.sign() * form.max * scale
    assert torch.equal(back[~inside], beyond[~inside])


@given(case=tensors_and_blocks(), symmetric=st.booleans())
def test_integers_when_quantized_in_blocks_then_within_half_a_step(case, symmetric):
    x, block = case
    rows = to_rows(x, block)
    low, high = rows.amin(1).clamp(max=0), rows.amax(1).clamp(min=0)
    grid = grid_shape(x.shape, block)
    scales = ((high - low).clamp(min=1e-6) / 15).reshape(grid)
    zero = (-low / scales.flatten()).round().to(torch.int32).reshape(grid)
    limits = (0, 15, torch.uint8)
    if symmetric:
        scales = (torch.maximum(-low, high).clamp(min=1e-6) / 7).reshape(grid)
        zero, limits = None, (-8, 7, torch.int8)
    q = ops.QuantizeBlock(x, scales, zero, block, *limits)
    back = ops.DequantizeBlock(q, scales, zero, block, *limits)
    assert bool(((back - x).abs() <= spread(scales, x.shape, block) * 0.5001).all())


@given(seed=st.integers(0, 50), group=st.sampled_from([2, 4, 16]), affine=st.booleans())
def test_integers_when_quantized_decomposed_can_say_it_then_the_same_bits(seed, group, affine):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(6, 16, generator=generator)
    scales = torch.rand(6, 16 // group, generator=generator) + 0.01
    zero = torch.randint(0, 15 if affine else 1, scales.shape, generator=generator).int()
    limits = (0, 15, torch.uint8) if affine else (-8, 7, torch.int8)
    theirs = torch.ops.quantized_decomposed.quantize_per_channel_group(
        x, scales, zero, *limits, group
    )
    ours = ops.QuantizeBlock(x, scales, zero if affine else None, [1, group], *limits)
    assert torch.equal(ours, theirs)
    back = torch.ops.quantized_decomposed.dequantize_per_channel_group(
        theirs, scales, zero, *limits, group, torch.float32
    )
    assert torch.equal(ops.DequantizeBlock(ours, scales, zero, [1, group], *limits), back)


@given(case=tensors_and_blocks(), own=st.booleans(), size=st.integers(2, 20))
def test_code_books_when_quantized_then_the_nearest_value(case, own, size):
    x, block = case
    rows = to_rows(x, block) if own else x.reshape(1, -1)
    table = fit_tables(rows, size)
    table = table.reshape(*grid_shape(x.shape, block), size) if own else table.reshape(-1)
    codes = ops.QuantizeCodeBook(x, table, None, block)
    assert codes.dtype == torch.uint8
    back = ops.DequantizeCodeBook(codes, table, None, block)
    wide = to_rows(x, block).unsqueeze(2)
    best = (wide - (table.reshape(-1, 1, size) if own else table)).abs().amin(2)
    error = to_rows((back - x).abs(), block)
    # Where a block reaches beyond the tensor, both are of zeros that fill it up.
    is_inside = to_rows(torch.ones_like(x), block) == 1
    assert int(is_inside.sum()) == x.numel()
    assert bool((error <= best)[is_inside].all())


def test_e8m0_scales_when_chosen_then_those_of_the_specification():
    x = torch.zeros(4, 32)
    x[0, 3], x[1, 5], x[2, 0] = 6.5, -0.75, 2.0**-140
    scales = ops.ChooseScales(x, None, [1, 32], FP4_E2M1.max, E8M0)
    # floor(log2(amax)) - 2, at least -127
    assert scales.view(torch.uint8).flatten().tolist() == [127, 124, 0, 0]
    codes = ops.QuantizeFloat(x, scales, None, [1, 32], FP4_E2M1.name)
    back = ops.DequantizeFloat(codes, scales, None, [1, 32], FP4_E2M1.name)
    assert back[0, 3] == 6.0  # 6.5 saturates
    assert back[1, 5] == -0.75


def test_nan_when_a_block_holds_one_then_all_of_the_block_is():
    x = torch.randn(2, 32)
    x[0, 7] = torch.nan
    for dtype in SCALES:
        scales = ops.ChooseScales(x, None, [1, 32], FP4_E2M1.max, dtype)
        codes = ops.QuantizeFloat(x, scales, None, [1, 32], FP4_E2M1.name)
        back = ops.DequantizeFloat(codes, scales, None, [1, 32], FP4_E2M1.name)
        assert back[0].isnan().all()
        assert back[1].isfinite().all()


def test_nvfp4_when_scales_are_in_units_of_the_tensors_then_far_ranges_fit():
    x = torch.randn(4, 64) * torch.tensor([1e-6, 1e-6, 1e4, 1e4]).unsqueeze(1)
    x = x[2:]
    whole = ops.ChooseScales(x, None, [-1, -1], FP4_E2M1.max * FP8_E4M3.max, torch.float32)
    scales = ops.ChooseScales(x, whole, [1, 16], FP4_E2M1.max, torch.float8_e4m3fn)
    assert scales.float().max() == 448.0
    codes = ops.QuantizeFloat(x, scales, whole, [1, 16], FP4_E2M1.name)
    back = ops.DequantizeFloat(codes, scales, whole, [1, 16], FP4_E2M1.name)
    assert (back - x).square().mean().sqrt() / x.square().mean().sqrt() < 0.12


def calls():
    x = torch.randn(3, 5, 32)
    block = [1, -1, 16]
    scales = ops.ChooseScales(x, None, block, 6.0, E8M0)
    whole = torch.tensor([0.5])
    integers = (torch.rand(3, 1, 2) + 0.1, None, block, -8, 7, torch.int8)
    zero = torch.ones(3, 1, 2, dtype=torch.int32)
    affine = (integers[0], zero, block, 0, 15, torch.uint8)
    floats = (scales, whole, block, FP4_E2M1.name)
    book = (NF4.table(), integers[0], block)
    own = (torch.randn(3, 1, 2, 4).sort().values, None, block)
    yield ops.ChooseScales, (x, whole, block, 6.0, E8M0)
    for quantize, dequantize, rest in (
        (ops.QuantizeBlock, ops.DequantizeBlock, integers),
        (ops.QuantizeBlock, ops.DequantizeBlock, affine),
        (ops.QuantizeFloat, ops.DequantizeFloat, floats),
        (ops.QuantizeFloat, ops.DequantizeFloat, (integers[0], None, block, FP8_E4M3.name)),
        (ops.QuantizeCodeBook, ops.DequantizeCodeBook, book),
        (ops.QuantizeCodeBook, ops.DequantizeCodeBook, own),
    ):
        yield quantize, (x, *rest)
        yield dequantize, (quantize(x, *rest), *rest)


CALLS = list(calls())


@pytest.mark.parametrize(("op", "arguments"), CALLS, ids=[str(op) for op, _ in CALLS])
def test_operators_when_checked_by_torch_then_proper(op, arguments):
    is_narrow = any(isinstance(a, torch.Tensor) and a.dtype in FLOAT8 for a in arguments)
    # torch 2.13: its schema check multiplies its arguments, which no float8 can
    tests = ("test_faketensor",) if is_narrow else ("test_schema", "test_faketensor")
    torch.library.opcheck(op, arguments, test_utils=tests)
    if "dequantize" in str(op):
        assert op(*arguments, out_dtype=torch.bfloat16).dtype is torch.bfloat16
        torch.library.opcheck(op, arguments, {"out_dtype": torch.float16}, test_utils=tests)


@pytest.mark.parametrize("own", [True, False])
def test_operators_when_input_is_transposed_then_the_layout_that_fakes_say(own):
    x = torch.randn(32, 5).t()
    scales = ops.ChooseScales(x, None, [1, 16], 6.0, torch.float32)
    table = fit_tables(to_rows(x, [1, 16]), 4).reshape(5, 2, 4) if own else NF4.table()
    for op, rest in (
        (ops.QuantizeFloat, (scales, None, [1, 16], FP4_E2M1.name)),
        (ops.QuantizeBlock, (scales, None, [1, 16], -8, 7, torch.int8)),
        (ops.QuantizeCodeBook, (table, scales, [1, 16])),
    ):
        torch.library.opcheck(op, (x, *rest), test_utils=("test_schema", "test_faketensor"))
        assert torch.equal(op(x, *rest), op(x.contiguous(), *rest))


class Call(torch.nn.Module):
    def __init__(self, op, rest):
        super().__init__()
        self.op = op
        self.rest = rest

    def forward(self, x):
        return self.op(x, *self.rest)


@pytest.mark.parametrize(("op", "arguments"), CALLS, ids=[str(op) for op, _ in CALLS])
def test_operators_when_written_out_in_aten_then_the_same_bits(op, arguments):
    x, *rest = arguments
    program = torch.export.export(
        Call(op, rest), (x,), dynamic_shapes=({0: torch.export.Dim.AUTO},)
    )
    kept = [n.target for n in program.graph.nodes if n.op == "call_function"]
    assert op in kept
    table = torch.export.default_decompositions()
    table.update(ops.DECOMPOSITIONS)
    written = program.run_decompositions(table)
    spaces = {
        n.target.namespace
        for n in written.graph.nodes
        if n.op == "call_function" and isinstance(n.target, torch._ops.OpOverload)
    }
    assert spaces <= {"aten", "prims"}
    expected, found = op(*arguments), written.module()(x)
    assert expected.dtype == found.dtype
    size = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[expected.element_size()]
    assert torch.equal(expected.view(size), found.contiguous().view(size))


@pytest.mark.parametrize("op", [ops.QuantizeFloat, ops.DequantizeFloat])
def test_operators_when_scales_do_not_fit_then_refused_also_for_fakes(op):
    x = torch.zeros(4, 32, dtype=torch.uint8 if "dequantize" in str(op) else torch.float32)
    with pytest.raises(ConfigError, match=r"have scales of \[4, 2\]"):
        op(x, torch.ones(4, 1), None, [1, 16], FP4_E2M1.name)
    with pytest.raises(ConfigError, match="a length for each of 2 axes"):
        op(x, torch.ones(4, 1), None, [16], FP4_E2M1.name)


def test_tables_when_their_grid_differs_then_refused():
    with pytest.raises(ConfigError, match="a code book is"):
        ops.QuantizeCodeBook(torch.zeros(4, 8), torch.zeros(2, 1, 4), None, [1, -1])


@given(
    st.lists(st.floats(-8, 8, width=32), min_size=1, max_size=40),
    st.integers(1, 8),
)
def test_fitted_tables_when_more_values_than_data_then_no_error_left(values, extra):
    rows = torch.tensor([values])
    distinct = len(set(values))
    table = fit_tables(rows, len(values) * 2 + extra)
    assert table.diff(dim=1).min() >= 0
    if distinct <= 2:
        error = (rows.unsqueeze(2) - table.unsqueeze(1)).abs().amin(2)
        assert error.max() <= 1e-6 * rows.abs().max()
