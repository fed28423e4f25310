"""Scales of run time for rows, against transcriptions of their sources in numpy."""

import numpy as np
import torch

from pt2e_quant.core.integer_ops.calls import compute
from pt2e_quant.core.integer_ops.profiles import RowQuantization
from pt2e_quant.core.integer_ops.quantize import choose_rows

F = np.float32


def rows():
    """Rows on a lattice, whose values lie on ties often; of one sign; drawn; zeros; tiny."""
    generator = torch.Generator().manual_seed(0)
    widths = torch.randint(1, 300, (400, 1), generator=generator)
    steps = torch.randint(0, 100_000, (400, 32), generator=generator) % widths
    lattice = (steps - widths // 3).float() * 0.0123 / 4
    drawn = torch.randn(400, 32, generator=generator)
    return torch.cat([lattice, lattice.abs(), -lattice.abs(), drawn, drawn * 1e-9, drawn[:1] * 0])


def xnnpack(row):
    """xnn_f32_qd8_asymmetric_quantization_params: scale, what is multiplied by, zero_point."""
    rmin, rmax = min(F(0), row.min()), max(F(0), row.max())
    scale = F(1) if rmin == rmax else F(255) / (rmax - rmin)
    low, high = rmin * scale, rmax * scale
    from_min, from_max = F(-128) + low, F(127) + high
    zero = F(-128) - low if from_min + from_max > 0 else F(127) - high
    zero = np.rint(np.minimum(np.maximum(zero, F(-128)), F(127)))
    inv_scale = F(1) / scale
    return inv_scale, F(1) / inv_scale, zero


def onnx(row):
    """The operators that backends/onnx writes, with uint8 as int8."""
    top = max(row.max(), F(255) * np.finfo(F).eps)
    low = min(row.min(), F(0))
    negated = (low - top) * F(1 / 255)
    return -negated, -negated, np.rint(low / negated) - F(128)


def test_rows_when_chosen_then_as_the_sources_have_it_to_the_last_bit():
    x = rows()
    sources = {
        RowQuantization.INVERSE_OF_INVERSE: xnnpack,
        RowQuantization.DIVIDED: onnx,
    }
    for by, source in sources.items():
        found = torch.cat(choose_rows(compute, x, by), 1)
        with np.errstate(all="raise", under="ignore"):
            expected = torch.tensor([[float(v) for v in source(row)] for row in x.numpy()])
        assert torch.equal(found, expected)
