"""Functions of complex numbers give what torch gives, in operators of real numbers."""

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from pt2e_quant.graph.pipeline import run_passes
from pt2e_quant.passes.functions.write_complex import write_complex


def two(x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.complex(x, x.cos()), torch.complex(x.sin(), x.flip(0))


def rotated(x: Tensor) -> Tensor:
    turns = torch.polar(torch.ones(3), torch.arange(3.0))
    pairs = torch.view_as_complex(x.reshape(x.shape[0], -1, 2))
    return torch.view_as_real(pairs * turns).flatten(1)


def joined(x: Tensor) -> Tensor:
    parts = torch.stack([*two(x)]).chunk(2, 1)
    return torch.cat([part.abs() for part in parts], 1)


def chosen(x: Tensor) -> Tensor:
    a, b = two(x)
    return torch.where(x > 0, a, 0.0).imag + torch.where(x > 0, a, b).real


def filtered(x: Tensor) -> Tensor:
    """A Fourier neural operator's layer: products of the lowest frequencies alone."""
    low = torch.fft.rfft2(x)[:, :2] * two(x)[0][:, :2]
    kept = torch.slice_scatter(torch.zeros(4, 4, dtype=torch.cfloat)[:, :2], low[:2], 0, 1, 3)
    return torch.fft.irfft2(torch.cat([kept, kept * 0], 1), s=(4, 6))


FUNCTIONS = {
    "rotation": rotated,
    "transforms": lambda x: torch.fft.fft(x).real + torch.fft.ifft(x, dim=0, n=5).imag.sum(),
    "transforms of two axes": lambda x: torch.fft.fft2(x, norm="ortho").abs(),
    "transforms back": lambda x: (
        torch.fft.ifftn(torch.fft.fftn(x, norm="forward") * 1j, norm="forward").imag
    ),
    "half transforms": lambda x: torch.fft.irfft2(
        torch.fft.rfft2(x, norm="ortho") * (1 + 2j), s=(4, 6), norm="ortho"
    ),
    "half transforms of odd sizes": lambda x: torch.fft.irfftn(
        torch.fft.rfftn(x[:3, :5]), s=(3, 5)
    ),
    "cut and filled transforms": lambda x: torch.fft.irfft(torch.fft.rfft(x, n=9)[..., :3], n=7),
    "windows": lambda x: torch.stft(
        x.reshape(1, -1).repeat(1, 3), 16, 4, window=torch.hann_window(16), return_complex=True
    ).abs(),
    "quotients": lambda x: (two(x)[0] / (two(x)[1] + 3)).abs() + (2 / two(x)[0]).real,
    "angles": lambda x: (1j * two(x)[0]).angle(),
    "sums": lambda x: (two(x)[0] - x - 1).abs() + (x - two(x)[1]).imag + (two(x)[1] + x[:1]).real,
    "einsum": lambda x: torch.einsum("ij,kj->ik", two(x)[0], two(x)[1].conj()).imag,
    "matrix product": lambda x: (two(x)[0] @ two(x)[1].T).real,
    "powers": lambda x: two(x)[0].exp().real + two(x)[0].pow(3).imag + two(x)[1].square().imag,
    "joined parts": joined,
    "a choice": chosen,
    "filter": filtered,
}


class _Function(nn.Module):
    def __init__(self, function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_function_when_written_as_parts_then_as_torch(name):
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    gm = torch.export.export(_Function(FUNCTIONS[name]), (x,)).module()
    assert isinstance(gm, GraphModule)
    expected = gm(x)
    run_passes(gm, (write_complex(lambda node: False),))
    torch.testing.assert_close(gm(x), expected, rtol=2e-6, atol=2e-6)
    values = [n for n in gm.graph.nodes if isinstance(n.meta.get("val"), Tensor)]
    left = {str(n.target) for n in values if n.meta["val"].is_complex()}
    assert left <= {"aten.fft_rfft.default", "aten.stft.default"}
