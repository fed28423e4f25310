import pytest
import torch

from pt2e_quant.core.packing import pack
from pt2e_quant.kernels.int4_linear import cpu_tiles
from pt2e_quant.kernels.int4_linear.cpu_tiles import UnpackInt4
from pt2e_quant.kernels.int4_linear.few_rows_op import UINT4, PackInt4


def check(rows, columns):
    of_seed = torch.Generator().manual_seed(rows * columns)
    codes = torch.randint(0, 16, (rows, columns), generator=of_seed, dtype=torch.uint8)
    found = UnpackInt4(PackInt4(pack(codes, UINT4)), columns)
    assert found.shape == (rows + -rows % 16, columns)
    assert torch.equal(found[:rows], codes)


SHAPES = [(1, 32), (16, 64), (32, 32), (48, 96), (64, 32), (65, 64), (80, 32), (96, 128), (256, 64)]


@pytest.mark.parametrize("shape", SHAPES)
def test_codes_when_unpacked_then_are_those_that_were_packed(shape):
    check(*shape)


@pytest.mark.parametrize("shape", SHAPES)
def test_codes_when_the_order_of_tiles_is_not_known_then_are_found_place_by_place(
    shape, monkeypatch
):
    monkeypatch.setattr(cpu_tiles, "rows_of_a_tile", lambda: 0)
    check(*shape)


def test_tiles_when_a_cpu_with_avx2_packs_them_then_their_order_is_known():
    known = {"AVX2": 32}
    capability = torch.backends.cpu.get_cpu_capability()
    if capability not in known:
        pytest.skip(f"the order on {capability} was not looked at")
    assert cpu_tiles.rows_of_a_tile() == known[capability]
