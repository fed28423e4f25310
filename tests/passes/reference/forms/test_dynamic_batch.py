"""Forms that regroup dimensions, where the batch is dynamic or absent."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import pt2e_quant as pq
from pt2e_quant.core.provenance import provenance_of

LAST = {
    "group norm": nn.GroupNorm(3, 6),
    "reflect": lambda x: functional.pad(x, (1, 2, 2, 0), mode="reflect"),
    "replicate": lambda x: functional.pad(x, (1, 0, 0, 2), mode="replicate"),
    "circular": lambda x: functional.pad(x, (1, 2, 2, 0), mode="circular"),
    "nearest": lambda x: functional.interpolate(x, size=(7, 9), mode="nearest"),
    "bilinear": lambda x: functional.interpolate(x, scale_factor=2, mode="bilinear"),
}


class Net(nn.Module):
    """A convolution, and the operator."""

    def __init__(self, last) -> None:
        super().__init__()
        self.convolution, self.last = nn.Conv2d(3, 6, 3, padding=1), last

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.convolution(x))


def quantized(last, batches, shapes):
    torch.manual_seed(0)
    program = torch.export.export(Net(last).eval(), (batches[0],), dynamic_shapes=shapes)
    prepared = pq.prepare_pt2e(program, pq.IntegerQuantizer(), int_only=True)
    return pq.convert_pt2e(pq.calibrate(prepared, batches, progress=False))


def steps_apart(gm, x):
    reference = pq.integer_reference(gm)
    assert not [n for n in provenance_of(reference).notes if "dynamic" in n]
    (result,) = gm.graph.output_node().all_input_nodes
    with torch.no_grad():
        expected, found = gm(x), reference(x)
    assert found.shape == expected.shape
    return float(((found - expected) / result.args[1]).abs().max())


@pytest.mark.parametrize("name", LAST)
def test_form_when_the_batch_is_dynamic_then_runs_at_every_size(name):
    batch = torch.export.Dim("batch", min=1, max=16)
    gm = quantized(LAST[name], [torch.randn(3, 3, 5, 6) for _ in range(3)], ({0: batch},))
    for size in (1, 2, 16):
        assert steps_apart(gm, torch.randn(size, 3, 5, 6)) < 1.01


@pytest.mark.parametrize("name", ["reflect", "replicate", "circular"])
def test_pad_when_there_is_no_batch_then_moves_values_alike(name):
    gm = quantized(LAST[name], [torch.randn(3, 5, 6) for _ in range(3)], None)
    assert steps_apart(gm, torch.randn(3, 5, 6)) < 1.01
