"""Torch's sums and products of plain uint8, which would be the fastest: why no row uses them."""

import pytest
import torch

_LIMIT = 128


@pytest.mark.skipif(
    "AVX512" not in torch.backends.cpu.get_cpu_capability(),
    reason="torch has them wrong in its kernels for AVX512 alone",
)
@pytest.mark.parametrize("name", ["qadd", "qadd_relu", "qmul"])
def test_torch_sum_when_above_127_then_read_as_negative(name):
    # Of torch 2.13: 64 values go through vectors. A version without it can have a row for them.
    run = getattr(torch.ops.onednn, name).tensor
    x, one = torch.arange(64, 192, dtype=torch.uint8), torch.ones(128, dtype=torch.uint8)
    other = (one, 1.0, 0) if name == "qmul" else (one, 1.0, 1)
    found = run(x, 1.0, 0, *other, 1.0, 0, torch.uint8)
    is_small = x < _LIMIT
    assert torch.equal(found[is_small], x[is_small])
    assert int(found[~is_small].max()) == 0
