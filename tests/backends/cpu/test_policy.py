"""A shape class that measured below float stays float; the report repeats what was measured."""

import pytest
import torch
from torch import nn

from pt2e_quant.backends import get
from pt2e_quant.backends.cpu import lower, policy
from pt2e_quant.core.errors import Pt2eQuantWarning
from pt2e_quant.core.recurrent_ops import RecurrentLayer, Rounding
from pt2e_quant.flow.calibrate.calibrate import calibrate
from pt2e_quant.flow.convert.convert_pt2e import convert_pt2e
from pt2e_quant.flow.prepare.prepare_pt2e import prepare_pt2e
from pt2e_quant.graph.ops import arguments
from pt2e_quant.kernels.int8_linear.cpu import class_of
from pt2e_quant.kernels.onednn import speed

CPU = get("cpu")
ALONE, CHAIN = "depthwise, small", "depthwise, small, in a chain"


@pytest.fixture
def measured(monkeypatch):
    """What the machine measured, as the test has it."""
    ratios: dict[str, float] = {}
    for module in (policy, lower):
        monkeypatch.setattr(module, "measured_here", lambda op: ratios)
    return ratios


def depthwise():
    return nn.Conv2d(16, 16, 3, padding=1, groups=16)


def chain():
    ends = nn.Conv2d(16, 16, 1), nn.Conv2d(16, 16, 1)
    return nn.Sequential(ends[0], nn.ReLU(), depthwise(), nn.ReLU6(), ends[1])


def converted(model, backend=CPU, quantizer=None):
    torch.manual_seed(0)
    x = torch.randn(1, 16, 8, 8)
    quantizer = quantizer or backend.quantizer("int8")
    prepared = prepare_pt2e(torch.export.export(model.eval(), (x,)), quantizer)
    calibrate(prepared, [(x,)], progress=False)
    return convert_pt2e(prepared)


def integer_convs(gm):
    return get("cpu").lower(gm).report.integer_ops.get("onednn.qconv_pointwise", 0)


def test_class_when_slower_than_float_then_it_stays_float_with_the_reason(measured):
    measured[ALONE] = 0.9
    gm = converted(nn.Sequential(depthwise(), nn.ReLU(), nn.Flatten(), nn.Linear(1024, 8)))
    report = get("cpu").lower(gm).report
    assert "onednn.qconv_pointwise" not in report.integer_ops
    assert "no slower than float" in str(report.provenance)


def test_program_when_every_class_is_slower_then_float_with_a_warning(measured):
    measured[ALONE] = 0.9
    with pytest.warns(Pt2eQuantWarning, match="measured no slower than float"):
        converted(depthwise())


def test_class_when_slower_is_allowed_then_lowered_by_every_other_constraint(measured):
    measured |= {ALONE: 0.9, CHAIN: 0.9}
    allowing = CPU.allowing_slower()
    assert integer_convs(converted(chain(), allowing)) == 3
    quantizer = CPU.quantizer().allowing("slower")
    assert integer_convs(converted(chain(), quantizer=quantizer)) == 3


def test_linear_of_symbolic_rows_when_the_class_of_the_example_is_slower_then_float(measured):
    rows = ({0: torch.export.Dim("n", max=64)},)
    measured[class_of(4, 16 * 16)] = 0.6
    net = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 512))
    ep = torch.export.export(net.eval(), (torch.randn(4, 16),), dynamic_shapes=rows)
    prepared = prepare_pt2e(ep, CPU.quantizer("int8"))
    calibrate(prepared, [(torch.randn(4, 16),)], progress=False)
    assert CPU.lower(convert_pt2e(prepared)).report.integer_ops["onednn.qlinear_pointwise"] == 1


@pytest.mark.parametrize(("ratio", "convs"), [(1.3, 3), (0.9, 2)])
def test_chain_when_measured_then_the_chain_decides(measured, ratio, convs):
    measured |= {ALONE: 0.9, CHAIN: ratio}
    assert integer_convs(converted(chain())) == convs


def test_class_when_not_measured_then_lowered_and_the_report_says_so(measured):
    notes = get("cpu").lower(converted(depthwise())).report.notes
    assert f"int8_conv2d, {ALONE} (1 call): not measured on {speed.cpu_slug()}" in notes


def test_report_when_measured_then_the_ratio_of_each_class(measured):
    measured |= {CHAIN: 1.25}
    notes = "\n".join(get("cpu").lower(converted(chain())).report.notes)
    assert f"int8_conv2d, {CHAIN} (1 call): measured 1.25 times as fast" in notes


def test_program_when_quantized_elsewhere_then_lowered_and_the_report_says_why(measured):
    gm = converted(depthwise())
    measured[ALONE] = 0.5
    artifact = get("cpu").lower(gm)
    assert artifact.report.integer_ops["onednn.qconv_pointwise"] == 1
    assert any("kept, its tensors are quantized already" in n for n in artifact.report.notes)


@pytest.mark.parametrize("name", ["cpu", "cuda", "onnx", "xnnpack"])
def test_op_table_when_read_then_no_entry_is_about_speed(name):
    pytest.importorskip({"onnx": "onnx", "xnnpack": "executorch"}.get(name, "torch"))
    texts = {(row.name, c.text) for row in get(name).table for c in row.constraints}
    assert [found for found in texts if "slower" in found[1] or "faster" in found[1]] == []


@pytest.mark.filterwarnings("ignore:The tensor attributes self._flat_weights:UserWarning")
def test_small_lstm_when_slower_is_allowed_then_its_state_is_rounded(monkeypatch):
    monkeypatch.setattr(policy, "has_integer_layers", lambda: True)
    layer = nn.LSTM(8, 8).eval()
    forms = []
    for quantizer in (
        CPU.quantizer("int8_dynamic"),
        CPU.allowing_slower().quantizer("int8_dynamic"),
    ):
        gm = prepare_pt2e(torch.export.export(layer, (torch.randn(3, 1, 8),)), quantizer)
        gm = convert_pt2e(gm)
        forms += [arguments(n)["rounding"] for n in gm.graph.nodes if n.target is RecurrentLayer]
    assert forms == [Rounding.NONE, Rounding.PER_TENSOR]
