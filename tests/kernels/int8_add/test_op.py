"""Where a sum, a product or a function beside q/dq becomes one call, and where it does not."""

import pytest
import torch
from torch import nn

from pt2e_quant.graph.pipeline import run_passes
from pt2e_quant.graph.show import show
from pt2e_quant.kernels.int8_add.op import KERNELS as ADD
from pt2e_quant.kernels.quantize.op import KERNELS as QUANTIZE
from pt2e_quant.kernels.quantize.op import fuse_lone_qdq
from pt2e_quant.kernels.registry import Registry
from tests.kernels.lowering import calls_of, captured, fuse, qdq

KERNELS = (*ADD, *QUANTIZE)
IMAGES = (2, 3, 4, 5)


class Model(nn.Module):
    def __init__(self, run):
        super().__init__()
        self.run = run

    def forward(self, *inputs):
        return self.run(*inputs)


def fused(run, *inputs):
    """The fused graph, and the largest difference from the q/dq graph."""
    gm = captured(Model(run), *inputs)
    wanted = gm(*inputs)
    fuse(gm, KERNELS)
    return gm, (gm(*inputs) - wanted).abs().max().item()


def two(shape=IMAGES):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


CASES = {
    "two int8, relu": (lambda x, y: qdq(torch.relu(qdq(x, 0.02) + qdq(y, 0.03, 5)), 0.05), 1),
    "float result": (lambda x, y: qdq(x, 0.02) - qdq(y, 0.03, 5), 1),
    "the second alone int8": (lambda x, y: qdq(x - qdq(y, 0.03, 5), 0.05), 1),
    "broadcast product": (
        lambda x, y: qdq(qdq(x, 0.02) * qdq(y, 0.03).mean((2, 3), True), 0.01, 9),
        1,
    ),
    "two floats to int8": (lambda x, y: qdq(x + y, 0.05, -3), 1),
    "a function alone": (lambda x, y: qdq(torch.relu(qdq(x, 0.02)), 0.03, -128), 1),
    "none in integers": (lambda x, y: torch.relu(x + y), 0),
    "scaled": (lambda x, y: torch.add(qdq(x, 0.02), qdq(y, 0.03), alpha=2), 0),
    "a number": (lambda x, y: qdq(qdq(x, 0.02) * 0.5, 0.01), 0),
}


@pytest.mark.parametrize("name", CASES)
def test_fuse_when_a_case_can_be_fused_then_is_the_q_dq_graph_to_the_last_bit(name):
    run, count = CASES[name]
    gm, difference = fused(run, *two())
    assert len(calls_of(gm)) == count
    assert difference == 0.0


def test_fuse_when_the_subtrahend_is_quantized_then_it_keeps_its_place():
    gm, difference = fused(lambda x, y: qdq(x - qdq(y, 0.03), 0.05), *two())
    assert "combine=sub, y_scale=0.03" in show(gm)
    assert difference == 0.0


def test_fuse_lone_qdq_when_no_kernel_took_a_qdq_then_each_is_one_launch_and_equal():
    x, _ = two()
    gm = captured(Model(lambda x: qdq(torch.nn.functional.elu(qdq(x, 0.02, 4)), 0.03)), x)
    wanted = gm(x)
    run_passes(gm, (fuse_lone_qdq,), verify=True, sample=((x,), {}))
    assert calls_of(gm) == ["quantize"] * 4
    assert calls_of(gm, "quantized_decomposed") == []
    assert torch.equal(gm(x), wanted)
    assert not fuse_lone_qdq(gm).changed


def test_registry_when_asked_for_the_device_then_has_int8_add_and_quantize():
    assert {k.op for k in Registry.of(KERNELS[0].device)} >= {"int8_add", "quantize"}
