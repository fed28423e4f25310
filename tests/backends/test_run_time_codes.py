"""Integers of activations with scales of run time, read off the product behind them."""

import pytest
import torch
from torch import nn

import pt2e_quant as pq
from pt2e_quant.backends.registry import get
from pt2e_quant.backends.run_time_codes import probe, run_time_inputs
from pt2e_quant.core.qdq import CHOOSE_QPARAMS_OPS


def converted(model, x, recipe, backend):
    package = {"xnnpack": "executorch", "onnx": "onnxruntime"}[backend]
    pytest.importorskip(package)
    program = torch.export.export(model.eval(), (x,))
    return pq.convert_pt2e(pq.prepare_pt2e(program, get(backend).quantizer(recipe)))


@pytest.mark.parametrize("sizes", [(64, 160), (160, 64)], ids=["all places", "some places"])
@pytest.mark.parametrize(
    ("backend", "recipe"),
    [
        *(("xnnpack", "int8_dynamic"), ("xnnpack", "a8w4_g32"), ("xnnpack", "a8w4")),
        *(("onnx", "a8w4"), ("onnx", "int8_dynamic_per_tensor")),
    ],
)
def test_probe_when_run_then_its_steps_are_the_integers_of_the_input(backend, recipe, sizes):
    torch.manual_seed(0)
    inputs, outputs = sizes
    x = torch.randn(3, 5, inputs)
    gm = converted(nn.Linear(inputs, outputs), x, recipe, backend)
    before = {name: value.clone() for name, value in gm.state_dict().items()}
    ((node, reason),) = run_time_inputs(gm).items()
    assert reason is None
    found = probe(gm, node)
    (choose,) = [n for n in gm.graph.nodes if n.target in CHOOSE_QPARAMS_OPS]
    scale, zero_point = choose.target(x, *choose.args[1:])
    low = -128 if "int8" in str(node.args) else 0
    codes = (torch.round(x / scale) + zero_point).clamp(low, low + 255) - zero_point
    places = torch.arange(outputs) * inputs // outputs
    if inputs <= outputs:
        places = torch.arange(outputs) % inputs
    (made,) = found.gm(x)
    steps = made / (found.steps * scale)
    assert (steps - codes[..., places]).abs().max() < 1e-2
    assert all(torch.equal(before[name], value) for name, value in gm.state_dict().items())


def test_probe_when_a_convolution_reads_it_then_one_tap_of_its_kernel():
    xnnpack = pytest.importorskip("executorch.backends.xnnpack.quantizer.xnnpack_quantizer")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 6, 3, 2, 1, groups=2), nn.Flatten(), nn.Linear(96, 5)).eval()
    x = torch.randn(1, 4, 8, 8)
    config = xnnpack.get_symmetric_quantization_config(is_per_channel=True, is_dynamic=True)
    quantizer = xnnpack.XNNPACKQuantizer().set_global(config)
    prepared = pq.prepare_pt2e(torch.export.export(model, (x,)), quantizer)
    prepared(x)
    gm = pq.convert_pt2e(prepared)
    assert list(run_time_inputs(gm).values()) == [None] * len(run_time_inputs(gm))
    node = next(iter(run_time_inputs(gm)))
    found = probe(gm, node)
    (made,) = found.gm(x)
    choose = node.args[1].args[0]
    steps = made / (found.steps * choose.target(x, *choose.args[1:])[0])
    assert (steps - steps.round()).abs().max() < 1e-2
    assert len(steps.round().unique()) > 20
    parity = pq.verify_parity(get("xnnpack").lower(gm), [x])
    assert all(row.is_run_time for row in parity.table)
    assert parity.nodes[0].share_equal >= 0.999
