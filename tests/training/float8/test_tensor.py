import copy

import pytest
import torch

from pt2e_quant.core.errors import ConfigError
from pt2e_quant.core.granularity import PerBlock, PerRow, PerTensor
from pt2e_quant.training.float8.config import GemmInputRole, LinearMMConfig, ScaledMMConfig
from pt2e_quant.training.float8.tensor import Float8Tensor, amax_of, scale_of, to_float8

GRANULARITIES = (PerTensor(), PerRow(-1), PerRow(0), PerBlock((1, 128)), PerBlock((128, 128)))


def randn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_to_float8_when_dequantized_then_error_is_half_a_step_and_gradient_passes(
    granularity, dtype
):
    x = randn(6, 200, dtype=torch.bfloat16).requires_grad_()
    found = to_float8(x, dtype, granularity=granularity)
    assert isinstance(found, Float8Tensor)
    assert (found.dtype, found.shape) == (x.dtype, x.shape)
    real = found.dequantize()
    # half a step of 3 or 2 bits of mantissa, and one of bfloat16's 8
    step = 2.0**-4 if dtype == torch.float8_e4m3fn else 2.0**-3
    assert ((real - x).abs() <= x.abs() * (step + 2.0**-8) + 1e-4).all()
    real.backward(upstream := randn(6, 200, dtype=torch.bfloat16, seed=1))
    assert torch.equal(x.grad, upstream)


def test_float8_tensor_when_scaled_by_rows_then_axis_and_scale_say_so():
    x = randn(6, 200)
    for axis, shape in ((-1, (6, 1)), (0, (1, 200))):
        found = to_float8(x, granularity=PerRow(axis))
        assert (found.axis, found.scale.shape) == (axis, shape)
        assert found.t().axis == -1 - axis
        assert torch.equal(found.t().dequantize(), found.dequantize().t())
    assert to_float8(x).axis is None
    assert to_float8(x).scale.shape == (1, 1)


def test_to_float8_when_values_are_beyond_the_scale_then_they_saturate():
    x = torch.tensor([[1.0, -1000.0, torch.inf, -torch.inf]])
    found = to_float8(x, scale=torch.tensor(1.0)).dequantize()
    assert found.tolist() == [[1.0, -448.0, 448.0, -448.0]]
    own = to_float8(x)
    assert own.codes.float().tolist() == [[0.0, 0.0, 448.0, -448.0]]
    assert to_float8(torch.zeros(2, 3)).dequantize().tolist() == [[0.0] * 3] * 2


def test_float8_tensor_when_code_knows_nothing_of_it_then_it_sees_real_values():
    x = to_float8(randn(4, 8, dtype=torch.bfloat16))
    real = x.dequantize()
    for run in (torch.sigmoid, lambda v: v + 1, lambda v: v.sum(0), lambda v: v @ real.t()):
        assert type(run(x)) is torch.Tensor
        assert torch.equal(run(x), run(real))
    assert "float8_e4m3fn PerTensor()" in repr(x)


def test_float8_tensor_when_values_only_move_then_it_stays_float8():
    x = to_float8(randn(4, 8))
    real = x.dequantize()
    moved = (
        lambda v: v.view(8, 4),
        lambda v: v[1:3],
        lambda v: v.t(),
        lambda v: v.detach().clone(),
        lambda v: torch.cat(v.split(2)),
        copy.deepcopy,
    )
    for run in moved:
        found = run(x)
        assert isinstance(found, Float8Tensor)
        assert torch.equal(found.dequantize(), run(real))
    half = x.to(torch.bfloat16)
    assert isinstance(half, Float8Tensor)
    assert torch.equal(half.dequantize(), real.to(torch.bfloat16))
    assert not isinstance(torch.cat([x, to_float8(randn(4, 8, seed=1))]), Float8Tensor)
    assert not isinstance(to_float8(randn(4, 8), granularity=PerRow(0)).view(8, 4), Float8Tensor)


@pytest.mark.parametrize("granularity", [PerTensor(), PerRow(-1), PerBlock((1, 128))], ids=str)
def test_float8_tensor_when_multiplied_then_the_product_is_that_of_real_values(granularity):
    x = to_float8(randn(5, 130), granularity=granularity)
    other = PerBlock((128, 128)) if isinstance(granularity, PerBlock) else granularity
    weight = to_float8(randn(7, 130, seed=1), role=GemmInputRole.WEIGHT, granularity=other)
    expected = x.dequantize() @ weight.dequantize().t()
    torch.testing.assert_close(x @ weight.t(), expected, rtol=1e-6, atol=1e-5)
    bias = randn(7, seed=2)
    added = torch.addmm(bias, x, weight.t())
    torch.testing.assert_close(added, expected + bias, rtol=1e-6, atol=1e-5)


def test_float8_tensor_when_configs_of_operands_differ_then_the_product_refuses():
    x = to_float8(randn(4, 16), mm=LinearMMConfig(output=ScaledMMConfig(emulate=True)))
    weight = to_float8(randn(4, 16), role=GemmInputRole.WEIGHT)
    with pytest.raises(ConfigError, match='disagree about "output"'):
        x @ weight.t()


def test_float8_tensor_when_output_is_float8_then_the_product_is_one():
    mm = LinearMMConfig(output=ScaledMMConfig(fp8_output=True))
    x = to_float8(randn(4, 16), mm=mm)
    weight = to_float8(randn(4, 16, seed=1), role=GemmInputRole.WEIGHT, mm=mm)
    found = x @ weight.t()
    assert isinstance(found, Float8Tensor)
    expected = (x.dequantize() @ weight.dequantize().t()).to(torch.float8_e4m3fn)
    assert torch.equal(found.codes.float(), expected.float())


def test_to_float8_when_compiled_then_codes_and_scale_are_equal_to_the_bit():
    x = randn(37, 130, dtype=torch.bfloat16) * 3

    def cast(x):
        made = to_float8(x, granularity=PerRow(-1))
        return made.codes.view(torch.uint8), made.scale

    in_graph = torch._dynamo.allow_in_graph(cast)
    compiled = torch.compile(lambda x: in_graph(x), backend="aot_eager", fullgraph=True)
    for eager, traced in zip(cast(x), compiled(x), strict=True):
        assert torch.equal(eager, traced)


def test_amax_of_when_nothing_is_there_then_it_is_0():
    assert amax_of(torch.zeros(0, 4), PerTensor()).tolist() == [[0.0]]
    assert scale_of(torch.tensor(896.0), torch.float8_e4m3fn) == 2.0


def test_tensor_when_made_then_says_what_a_product_must_know():
    mm = LinearMMConfig(output=ScaledMMConfig(emulate=True))
    x = torch.randn(4, 16, dtype=torch.bfloat16)
    made = to_float8(x, torch.float8_e5m2, role=GemmInputRole.GRAD_OUTPUT, mm=mm)
    assert made.codes.dtype is torch.float8_e5m2
    assert made.role is GemmInputRole.GRAD_OUTPUT
    assert made.mm_config == mm
    assert made.original_dtype is made.dtype is torch.bfloat16


def test_to_float8_when_the_role_is_unknown_then_refused():
    with pytest.raises(ConfigError, match=r'there is no role "gradient".*grad_output'):
        to_float8(torch.ones(2, 2), role="gradient")
