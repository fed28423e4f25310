import torch
from torch import nn
from torch.export import export

import pt2e_quant as pq
from pt2e_quant.command_line.open_model import describe_program
from pt2e_quant.flow.reexport import export_again


def model_and_input():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).eval(), torch.randn(2, 4)


def test_describe_when_the_program_is_float_then_that_reason():
    model, x = model_and_input()
    report = describe_program(export(model, (x,)).module())
    assert report.float_ops == {"aten.linear": 2, "aten.relu": 1}
    assert {r.reason for r in report.provenance.floats} == {"this program is not quantized"}
    assert report.size_bytes == report.float_size_bytes == 4 * (32 + 8 + 24 + 3)


def test_describe_when_the_program_is_quantized_then_read_off_its_graph(plain_backend):
    model, x = model_and_input()
    prepared = pq.prepare_pt2e(export(model, (x,)), plain_backend.quantizer())
    pq.calibrate(prepared, [x])
    report = describe_program(export_again(pq.convert_pt2e(prepared)).module())
    assert report.integer_ops == {"aten.linear": 2, "aten.relu": 1}
    assert report.float_ops == {}
    weights = [r for r in report.provenance.tensors if r.role == "weight"]
    assert [(w.dtype, w.axis, w.size_before) for w in weights] == [
        ("int8", 0, 128),
        ("int8", 0, 96),
    ]
    assert [len(w.scale) for w in weights] == [8, 3]
    assert report.size_bytes < report.float_size_bytes


def test_describe_when_a_call_only_lays_out_scales_then_no_operator():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 32)).eval()
    program = export(model, (torch.randn(2, 128),))
    quantizer = pq.backends.get("onnx").quantizer("nf4_double")
    report = describe_program(pq.convert_pt2e(pq.prepare_pt2e(program, quantizer)))
    assert report.integer_ops == {"aten.linear": 2}
    assert report.float_ops == {"aten.relu": 1}
