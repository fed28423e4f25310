import torch
from torch import nn

from pt2e_quant import calibrate, convert, prepare
from pt2e_quant.backends import get
from pt2e_quant.backends.profile import WorkKind
from pt2e_quant.backends.profile_module import profile_module


def test_profile_module_when_converted_then_each_node_has_its_kind():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Flatten(), nn.Linear(8, 4)).eval()
    x = torch.randn(2, 8)
    program = torch.export.export(model, (x,))
    quantizer = get("onnx").quantizer("int8")
    converted = convert(calibrate(prepare(program, quantizer), [x], progress=False))
    found = {n.node: n for n in profile_module(converted, (x,), runtime="torch").nodes}
    assert found["linear"].kind is WorkKind.FLOAT
    assert found["flatten"].kind is WorkKind.MOVE
    assert found["quantize_per_tensor"].kind is WorkKind.CONVERT
    assert found["linear"].module == "0"
    assert found["linear"].cost.bytes == 4 * (2 * 8 + 8 * 8 + 8 + 2 * 8)
    assert all(node.time_us > 0 for node in found.values())
