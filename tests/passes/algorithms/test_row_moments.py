"""Moments of rows: the errors that they predict are those of running the layer."""

import torch

from pt2e_quant.passes.algorithms.row_moments import RowMoments, gain_db


def test_errors_when_computed_from_moments_then_those_of_the_rows_themselves():
    generator = torch.Generator().manual_seed(0)
    x, z = (torch.randn(500, 12, generator=generator) for _ in range(2))
    w, v = (torch.randn(5, 12, generator=generator) for _ in range(2))
    moments = RowMoments(
        (z.T @ z / 500)[None], ((x @ w.T).T @ z / 500)[None], (x @ w.T).square().mean(0)[None]
    )
    expected = (x @ w.T - z @ v.T).square().mean(0)
    torch.testing.assert_close(moments.errors(v[None])[0], expected, rtol=1e-4, atol=1e-4)
    alone = moments.of_rounding_alone(w)
    expected = (z @ (w - v).T).square().mean(0)
    torch.testing.assert_close(alone.errors(v[None])[0], expected, rtol=1e-4, atol=1e-4)
    assert float(alone.errors(w[None]).max()) < 1e-4


def test_slope_when_compared_with_autograd_then_the_same():
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(50, 6, generator=generator)
    moments = RowMoments((z.T @ z)[None], torch.randn(1, 3, 6, generator=generator), torch.ones(1))
    v = torch.randn(1, 3, 6, generator=generator, requires_grad=True)
    (100 + ((v @ moments.square - 2 * moments.target) * v).sum()).backward()
    torch.testing.assert_close(moments.slope(v.detach()), v.grad)


def test_gain_when_errors_fall_to_a_tenth_then_10_db():
    assert abs(gain_db(torch.tensor([1.0, 1.0]), torch.tensor([0.1, 0.1])) - 10) < 1e-5
