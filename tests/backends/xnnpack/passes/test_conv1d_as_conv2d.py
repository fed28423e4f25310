"""Convolutions of sequences with a dynamic batch and length: in the delegate, as conv2ds."""

import re

import pytest
import torch
from torch import nn
from torch.fx import GraphModule

import pt2e_quant as pq
from pt2e_quant.backends.xnnpack.artifact import XnnpackArtifact
from pt2e_quant.backends.xnnpack.backend import BACKEND
from pt2e_quant.backends.xnnpack.passes.as_convs_and_products import conv1d_as_conv2d
from pt2e_quant.core.qdq import DequantizePerTensor
from pt2e_quant.graph.pipeline import run_passes
from pt2e_quant.passes.qdq.duplicate_dequantize import duplicate_dequantize
from pt2e_quant.passes.weights.unpack_weights import unpack_weights

SIZES = {0: torch.export.Dim("batch", max=4), 2: torch.export.Dim("length", min=8, max=32)}
"""What is dynamic: batch and length."""

NETS = {
    "chain": lambda: [
        nn.Conv1d(8, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv1d(16, 16, 3, stride=2, groups=16),
        nn.ReLU6(),
        nn.Conv1d(16, 4, 1, bias=False),
    ],
    "transposed": lambda: [
        nn.ConvTranspose1d(8, 6, 4, stride=3, padding=1, output_padding=1),
        nn.ReLU(),
        nn.Conv1d(6, 5, 5, padding="same", dilation=2),
    ],
}

CONVS = {
    "chain": ["Conv2d", "DepthwiseConv2d", "Conv2d"],
    "transposed": ["ConvTranspose2d", "Conv2d"],
}


def converted(net: str, recipe: str = "int8", *, dynamic: tuple[int, ...] = (0, 2)) -> GraphModule:
    torch.manual_seed(0)
    model = nn.Sequential(*NETS[net]()).eval()
    sizes = {dim: SIZES[dim] for dim in dynamic}
    program = torch.export.export(model, (torch.randn(2, 8, 16),), dynamic_shapes=(sizes,))
    gm = pq.prepare_pt2e(program, BACKEND.quantizer(recipe))
    shape = (4, 8, 32) if len(dynamic) == 2 else (2, 8, 16)
    return pq.convert_pt2e(pq.calibrate(gm, [(torch.randn(shape),)], progress=False))


@pytest.mark.parametrize("net", NETS)
def test_file_when_batch_and_length_are_dynamic_then_integers_in_one_partition(net):
    gm = converted(net)
    artifact = BACKEND.lower(gm)
    assert isinstance(artifact, XnnpackArtifact)
    contents = artifact.contents()
    convs = [[op for op in ops if re.search("Conv(2d|Tr)", op.name)] for ops in contents.delegates]
    (found,) = (ops for ops in convs if ops)
    assert [op.name for op in found] == CONVS[net]
    assert all(op.is_integer for op in found)
    # Beside the delegate: sizes, and views of them.
    assert all(re.match(r"aten.sym_size|executorch_prim\.", name) for name in contents.kernels)
    step = [n for n in gm.graph.nodes if n.target is DequantizePerTensor][-1].args[1]
    for n, length in ((1, 8), (3, 11), (4, 32)):
        x = torch.randn(n, 8, length)
        torch.testing.assert_close(artifact.run(x), gm(x), rtol=0, atol=1.001 * step)


def test_pass_when_run_then_the_same_values_and_once():
    gm = converted("chain")
    x = torch.randn(3, 8, 17)
    expected = gm(x)
    run_passes(gm, (unpack_weights, duplicate_dequantize))
    assert conv1d_as_conv2d(gm).changed
    calls = [str(n.target) for n in gm.graph.nodes if n.op == "call_function"]
    assert calls.count("aten.unflatten.int") == calls.count("aten.flatten.using_ints") == 1
    assert calls.count("aten.conv2d.default") == 3
    assert torch.equal(gm(x), expected)
    assert not conv1d_as_conv2d(gm).changed


@pytest.mark.parametrize("dynamic", [(), (0,), (2,)])
def test_pass_when_at_most_one_size_is_dynamic_then_kept(dynamic):
    assert not conv1d_as_conv2d(converted("chain", dynamic=dynamic)).changed


def test_file_when_convolutions_stay_float_then_one_partition_too():
    torch.manual_seed(0)

    class Ends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(*NETS["chain"]())
            self.head = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.body(x).transpose(1, 2))

    program = torch.export.export(Ends().eval(), (torch.randn(2, 8, 16),), dynamic_shapes=(SIZES,))
    gm = pq.convert_pt2e(pq.prepare_pt2e(program, BACKEND.quantizer("w8")))
    artifact = BACKEND.lower(gm)
    x = torch.randn(3, 8, 21)
    torch.testing.assert_close(artifact.run(x), gm(x), rtol=1e-4, atol=1e-5)
    assert artifact.report.float_ops["Conv2d"] == 2
    assert artifact.report.float_ops["DepthwiseConv2d"] == 1


class Twice(nn.Module):
    """One layer, called with two inputs."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.linear, self.layer = nn.Linear(5, 5), layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        return self.layer(y) + self.layer(y * 2)


@pytest.mark.parametrize("is_float", [True, False])
@pytest.mark.parametrize("layer", [nn.Conv1d(5, 6, 3), nn.ConvTranspose1d(5, 6, 3)])
def test_conv1d_when_called_twice_then_lowered(layer: nn.Module, is_float: bool) -> None:
    torch.manual_seed(0)
    model, x = Twice(layer).eval(), torch.randn(2, 5, 5)
    quantizer = BACKEND.quantizer("int8")
    if is_float:
        quantizer = quantizer.set_module_name("layer", None)
    gm = pq.prepare_pt2e(torch.export.export(model, (x,)), quantizer)
    gm = pq.convert_pt2e(pq.calibrate(gm, [(x,)], progress=False))
    artifact = BACKEND.lower(gm, (x,))
    assert pq.sqnr_db(model(x), artifact.run(x)) > 25
