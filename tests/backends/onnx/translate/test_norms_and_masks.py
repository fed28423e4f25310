"""Norms of a root mean square and masks in the form with the fewest operators."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

pytest.importorskip("onnxruntime", reason="the extra onnx is not installed")


from pt2e_quant.graph.idioms.masks import MASK_RULES
from pt2e_quant.graph.idioms.rms_norm import RMS_NORM_RULES
from pt2e_quant.passes.attention.decompose_attention import masked_score

LOW = masked_score(torch.float32)
EPS = torch.finfo(torch.float32).eps
ROWS = torch.export.Dim("rows", min=1, max=64)


class Norms(nn.Module):
    """As `transformers` writes it, and torch's own."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.RMSNorm(16, eps=1e-6)
        self.weight = nn.Parameter(torch.linspace(-2, 2, 16))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * y, self.own(x * 2)


@pytest.fixture(scope="module")
def norms(exported):
    return exported(Norms(), (torch.randn(3, 16),), ({0: ROWS},)).compose(*RMS_NORM_RULES, fired=2)


@given(rows=st.integers(1, 5), size=st.floats(1e-4, 1e4), seed=st.integers(0, 99))
@settings(max_examples=25)
def test_rms_norm_when_sizes_vary_then_within_rounding(norms, rows, size, seed):
    x = torch.randn(rows, 16, generator=torch.Generator().manual_seed(seed)) * size
    # One and a half units in the last place of a value of 4, times a weight of 2.
    norms.equals(x, bound=1.5 * EPS * 4 * 2)


def test_rms_norm_when_ort_optimizes_then_a_norm_is_one_operator(norms, tmp_path):
    ops = norms.optimized_ops(tmp_path)
    assert ops["SimplifiedLayerNormalization"] == 2
    assert set(ops) == {"SimplifiedLayerNormalization", "Mul"}


def test_rms_norm_when_it_is_another_root_then_it_declines(exported):
    class Others(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            mean = x.pow(2).mean(-1, keepdim=True)
            root = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 2.0)
            return (
                (x + 1) * torch.rsqrt(mean + 1.0),
                x * root,
                root,
                x * torch.rsqrt(x.abs().pow(3).mean(-1, keepdim=True) + 1.0),
                x * torch.rsqrt(x.abs() + 1.0),
            )

    args = (torch.randn(3, 16),)
    exported(Others(), args).compose(*RMS_NORM_RULES, fired=0).equals(*args)


class Masks(nn.Module):
    """An additive mask, and which of its rows see anything, of booleans made at run time."""

    def forward(self, x: Tensor, limit: Tensor) -> tuple[Tensor, ...]:
        seen = x > limit
        return (seen.float() - 1.0) * -LOW, seen.any(-1, keepdim=True).float()


@given(rows=st.integers(1, 5), limit=st.floats(-3, 3), seed=st.integers(0, 99))
@settings(max_examples=25)
def test_masks_when_rows_see_nothing_then_equal(masks, rows, limit, seed):
    x = torch.randn(rows, 4, generator=torch.Generator().manual_seed(seed))
    low, sees = masks.equals(x, torch.tensor(limit))
    assert set(np.unique(low)) <= {0.0, np.float32(LOW)}
    assert set(np.unique(sees)) <= {0.0, 1.0}


@pytest.fixture(scope="module")
def masks(exported):
    program = exported(Masks(), (torch.randn(3, 4), torch.tensor(0.5)), ({0: ROWS}, None))
    program.compose(*MASK_RULES, fired=2)
    assert program.ops() == {"Greater": 1, "Where": 1, "Cast": 1, "ReduceMax": 1}
    return program


def test_masks_when_they_are_numbers_then_it_declines(exported):
    class Others(nn.Module):
        def forward(self, mask: Tensor, x: Tensor) -> tuple[Tensor, ...]:
            seen = x > 0
            return (
                (mask.float() - 1.0) * 5.0,
                (seen.float() - 0.5) * 5.0,
                (seen.float() - 1.0) * x,
                mask.amax(-1).bool().float(),
            )

    args = (torch.tensor([[0, 1, 3], [0, 0, 0]]), torch.randn(2, 3))
    program = exported(Others(), args)
    program.compose(*MASK_RULES, fired=0).equals(*args)
