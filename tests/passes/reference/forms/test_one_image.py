"""Convolutions of one image: inputs without a batch dimension, through every stage."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import pt2e_quant as pq
from pt2e_quant.observers.training.fake_quantize import disable_observer

KINDS = {
    "1d": (nn.Conv1d(4, 6, 3, stride=2, padding=1, groups=2), (4, 9)),
    "2d": (nn.Conv2d(4, 6, 3, dilation=2), (4, 7, 9)),
    "3d": (nn.Conv3d(4, 6, 2), (4, 5, 4, 3)),
    "transposed 1d": (nn.ConvTranspose1d(4, 6, 3, 2, output_padding=1), (4, 5)),
    "transposed 2d": (nn.ConvTranspose2d(4, 6, 3, 2, 1, groups=2), (4, 5, 4)),
}


class OneImage(nn.Module):
    """A convolution and a relu."""

    def __init__(self, convolution: nn.Module) -> None:
        super().__init__()
        self.convolution = convolution

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.convolution(x))


@pytest.mark.parametrize("kind", KINDS)
def test_convolution_when_of_one_image_then_integers_as_in_a_batch(kind):
    torch.manual_seed(0)
    convolution, shape = KINDS[kind]
    model, batches = OneImage(convolution), [torch.randn(shape) for _ in range(4)]
    program = torch.export.export(model.eval(), (batches[0],))
    prepared = pq.prepare_pt2e(program, pq.IntegerQuantizer(), int_only=True)
    quantized = pq.convert_pt2e(pq.calibrate(prepared, batches, progress=False))
    assert pq.audit(quantized).islands == ()
    reference = pq.integer_reference(quantized)
    step = max(n.args[1] for n in quantized.graph.nodes if "quantize_per_tensor" in n.name)
    for x in batches:
        assert reference(x).shape == quantized(x).shape
        assert (reference(x) - quantized(x)).abs().max() <= 1.001 * step


def test_convolution_when_of_one_image_then_trains_in_integers():
    torch.manual_seed(0)
    convolution, shape = KINDS["2d"]
    program = torch.export.export(OneImage(convolution).train(), (torch.randn(shape),))
    prepared = pq.prepare_qat_pt2e(program, pq.IntegerQuantizer(), numerics="integer")
    x = torch.randn(shape)
    prepared(x).square().mean().backward()
    assert all(p.grad.abs().sum() > 0 for p in prepared.parameters())
    prepared.apply(disable_observer)
    expected = prepared.eval()(x)
    reference = pq.integer_reference(pq.convert_pt2e(prepared))
    assert torch.equal(reference(x), expected)
