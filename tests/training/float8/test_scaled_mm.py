import pytest
import torch

from pt2e_quant.core.errors import ConfigError
from pt2e_quant.core.granularity import PerBlock, PerRow, PerTensor
from pt2e_quant.training.float8 import scaled_mm as unit
from pt2e_quant.training.float8.config import ScaledMMConfig
from pt2e_quant.training.float8.scaled_mm import Operand, has_scaled_mm, scaled_mm

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
OUT = (torch.bfloat16, torch.float16, torch.float32)
EMULATE = ScaledMMConfig(emulate=True)


def pick(choices, generator):
    return choices[torch.randint(len(choices), (), generator=generator)]


def operands(M, K, N, *, is_rowwise, generator, dtypes=FLOAT8):
    def codes(rows):
        return torch.randn(rows, K, generator=generator).to(pick(dtypes, generator))

    def scale(*shape):
        return torch.rand(shape, generator=generator) + 0.01

    if is_rowwise:
        a, b = (scale(M, 1), PerRow(-1)), (scale(N, 1).t(), PerRow(0))
    else:
        a, b = (scale(1, 1), PerTensor()), (scale(1, 1), PerTensor())
    return (
        Operand(codes=codes(M), scale=a[0], granularity=a[1]),
        Operand(codes=codes(N).t(), scale=b[0], granularity=b[1]),
    )


@pytest.mark.skipif(
    not (has_scaled_mm("cpu", is_rowwise=True) and has_scaled_mm("cpu", is_rowwise=False)),
    reason="torch._scaled_mm does not run on this CPU",
)
def test_scaled_mm_when_emulated_then_equals_torch_on_a_thousand_shapes():
    """To the last bit, but for what a CPU with AMX sums in tiles: there within rounding."""
    has_tiles = torch.cpu._is_amx_tile_supported()
    generator = torch.Generator().manual_seed(0)
    for i in range(1000):
        M, K, N = (int(torch.randint(1, 70, (), generator=generator)) for _ in range(3))
        left, right = operands(M, K, N, is_rowwise=bool(i % 2), generator=generator)
        dtype = pick(OUT, generator)
        if i % 2:
            scales = left.scale, right.scale.contiguous()
        else:
            scales = left.scale.reshape(()), right.scale.reshape(())
        expected = torch._scaled_mm(left.codes, right.codes, *scales, out_dtype=dtype)
        found = scaled_mm(left, right, dtype, EMULATE)
        if has_tiles and i % 2 == 0 and left.codes.dtype == right.codes.dtype:
            assert_rounded(found, expected, left, right)
        else:
            assert torch.equal(found, expected), (M, K, N, dtype)
        assert torch.equal(scaled_mm(left, right, dtype, ScaledMMConfig()), expected)


def assert_rounded(found, expected, left, right):
    """Equal but for sums in another order, and a neighbour in the dtype of the result."""
    size = left.real().double().abs() @ right.real().double().abs()
    sums = left.codes.shape[1] * torch.finfo(torch.float32).eps * size
    step = torch.finfo(expected.dtype).eps * expected.double().abs()
    tiny = torch.finfo(expected.dtype).smallest_normal * torch.finfo(expected.dtype).eps
    assert bool(((found.double() - expected.double()).abs() <= sums + step + tiny).all())


def test_scaled_mm_when_sizes_are_filled_up_then_the_product_stays():
    generator = torch.Generator().manual_seed(1)
    for is_rowwise in (False, True):
        left, right = operands(3, 21, 5, is_rowwise=is_rowwise, generator=generator)
        found = scaled_mm(left, right, torch.float32, ScaledMMConfig(pad_inner_dim=True))
        expected = left.real().double() @ right.real().double()
        torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-6)


def test_scaled_mm_when_float8_is_asked_for_then_the_kernel_writes_it():
    generator = torch.Generator().manual_seed(2)
    left, right = operands(4, 16, 8, is_rowwise=False, generator=generator)
    for emulate in (False, True):
        config = ScaledMMConfig(emulate=emulate, fp8_output=True)
        found = scaled_mm(left, right, torch.bfloat16, config)
        assert found.dtype == torch.float8_e4m3fn
        expected = (left.real() @ right.real()).to(found.dtype)
        assert torch.equal(found.float(), expected.float())


def test_scaled_mm_when_scales_are_of_blocks_then_it_is_emulated():
    generator = torch.Generator().manual_seed(3)
    codes = torch.randn(130, 200, generator=generator).to(torch.float8_e4m3fn)
    weight = torch.randn(140, 200, generator=generator).to(torch.float8_e4m3fn).t()
    left = Operand(codes=codes, scale=torch.rand(130, 2), granularity=PerBlock((1, 128)))
    right = Operand(codes=weight, scale=torch.rand(2, 2), granularity=PerBlock((128, 128)))
    found = scaled_mm(left, right, torch.float32, ScaledMMConfig())
    wide = left.scale.repeat_interleave(128, 1)[:, :200]
    tall = right.scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[:200, :140]
    expected = (codes.double() * wide) @ (weight.double() * tall)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-4)


def test_scaled_mm_when_a_gpu_refuses_the_sizes_then_the_fix_is_named():
    left = Operand(
        codes=torch.empty(4, 20, dtype=torch.float8_e4m3fn, device="meta"),
        scale=torch.empty(1, 1, device="meta"),
        granularity=PerTensor(),
    )
    right = Operand(codes=left.codes.t(), scale=left.scale, granularity=PerTensor())
    with pytest.raises(ConfigError, match="pad_inner_dim=True"):
        unit.check_sizes("cuda", 4, 20, 4)
    unit.check_sizes("cpu", 4, 20, 4)
    unit.check_sizes("cuda", 4, 32, 48)
    assert scaled_mm(left, right, torch.bfloat16, EMULATE).shape == (4, 4)
