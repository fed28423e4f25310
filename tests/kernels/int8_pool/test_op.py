"""Where pooling between q/dq becomes one call, and where it does not."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pt2e_quant.kernels.int8_pool.op import KERNELS, Int8Pool
from tests.kernels.lowering import calls_of, captured, fuse, qdq


class Pooled(nn.Module):
    def __init__(self, run):
        super().__init__()
        self.run = run

    def forward(self, x):
        return self.run(x)


CASES = {
    "max": lambda x: qdq(F.max_pool2d(qdq(x, 0.02, 3), 3, 2, 1), 0.02, 3),
    "max, ceil": lambda x: qdq(F.max_pool2d(qdq(x, 0.02), (2, 3), ceil_mode=True), 0.02),
    "max, indices": lambda x: qdq(F.max_pool2d(qdq(x, 0.02), 2, return_indices=True)[0], 0.02),
    "average": lambda x: qdq(F.avg_pool2d(qdq(x, 0.02), 3, 2, 1), 0.01, -7),
    "average of what is there": lambda x: qdq(
        F.avg_pool2d(qdq(x, 0.02), 3, 2, 1, ceil_mode=True, count_include_pad=False), 0.01
    ),
    "adaptive": lambda x: qdq(F.adaptive_avg_pool2d(qdq(x, 0.02), (2, 3)), 0.01),
    "global": lambda x: qdq(F.adaptive_avg_pool2d(qdq(x, 0.02), 1), 0.01),
    "mean": lambda x: qdq(qdq(x, 0.02).mean((-1, -2)), 0.01),
    "mean, float": lambda x: qdq(x, 0.02).mean((2, 3), keepdim=True),
}


@pytest.mark.parametrize("name", CASES)
def test_pool_when_between_qdq_then_is_one_call_within_a_step_of_the_q_dq_graph(name):
    x = torch.randn(2, 5, 9, 8, generator=torch.Generator().manual_seed(0))
    gm = captured(Pooled(CASES[name]), x)
    wanted = gm(x)
    fuse(gm, KERNELS)
    assert calls_of(gm) == ["int8_pool"]
    made = gm(x)
    assert made.shape == wanted.shape
    bound = 0.0 if "max" in name else (1e-6 if "float" in name else 0.0101)
    assert (made - wanted).abs().max() <= bound


@pytest.mark.parametrize(
    "run",
    [
        lambda x: qdq(F.max_pool2d(qdq(x, 0.02), 2, dilation=2), 0.02),
        lambda x: qdq(qdq(x, 0.02).mean((1, 2)), 0.02),
        lambda x: qdq(F.max_pool2d(x, 2), 0.02),
        lambda x: sum(F.max_pool2d(qdq(x, 0.02), 2, return_indices=True)),
    ],
)
def test_pool_when_the_kernel_has_no_such_form_then_stays(run):
    gm = captured(Pooled(run), torch.ones(2, 5, 9, 8))
    fuse(gm, KERNELS)
    assert calls_of(gm) == []


def test_pool_when_the_batch_is_symbolic_then_is_one_call():
    x = torch.randn(2, 5, 9, 8, generator=torch.Generator().manual_seed(0))
    shapes = ({0: torch.export.Dim("batch")},)
    ep = torch.export.export(Pooled(CASES["mean"]), (x,), dynamic_shapes=shapes)
    gm = fuse(ep.module(check_guards=False), KERNELS)
    (call,) = (n for n in gm.graph.nodes if n.target is Int8Pool)
    assert KERNELS[-1].cost(call.next).operations is not None
    assert gm(x[:1]).shape == (1, 5)
