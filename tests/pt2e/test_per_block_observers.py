"""Qualcomm's per-block observers, from their own file, are converted as torchao does it.

Their package cannot be imported: it downloads an SDK. The file needs one constant of it.
"""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import executorch
import pytest
import torch
from torch import nn
from torchao.quantization.pt2e import quantize_pt2e as torchao
from torchao.quantization.pt2e.quantizer import QuantizationAnnotation, QuantizationSpec, Quantizer

from pt2e_quant.pt2e import quantize_pt2e as ours

BLOCK = (1, 16)


@pytest.fixture
def observers(monkeypatch):
    constants = ModuleType("executorch.backends.qualcomm.utils.constants")
    constants.DEFAULT_EPS_FP32 = 0.0001 / 255
    for name in ("executorch.backends.qualcomm", "executorch.backends.qualcomm.utils"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, constants.__name__, constants)
    root = Path(next(iter(executorch.__path__)))
    path = root / "backends/qualcomm/quantizer/observers/per_block_param_observer.py"
    if not path.exists():
        pytest.skip("this ExecuTorch has no Qualcomm backend")
    spec = importlib.util.spec_from_file_location("qualcomm_per_block", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Blocks(Quantizer):
    """Weights of linears in blocks, activations float."""

    def __init__(self, constructor):
        self.spec = QuantizationSpec(
            dtype=torch.int8,
            observer_or_fake_quant_ctr=constructor.with_args(block_size=torch.Size(BLOCK)),
            quant_min=-7,
            quant_max=7,
            qscheme=torch.per_channel_symmetric,
            ch_axis=0,
        )

    def annotate(self, model):
        for node in model.graph.nodes:
            if node.target is torch.ops.aten.linear.default:
                node.meta["quantization_annotation"] = QuantizationAnnotation(
                    input_qspec_map={node.args[1]: self.spec}, _annotated=True
                )
        return model

    def validate(self, model):
        pass


@pytest.mark.parametrize("kind", ["PerBlockParamObserver", "PerBlockParamFakeQuantize"])
def test_per_block_weights_when_converted_then_as_torchao(observers, kind):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 16, bias=False))
    x = torch.randn(4, 32)
    results = []
    for flow in (ours, torchao):
        gm = torch.export.export(model.eval(), (x,)).module()
        is_qat = kind.endswith("FakeQuantize")
        prepare = flow.prepare_qat_pt2e if is_qat else flow.prepare_pt2e
        prepared = prepare(gm, Blocks(getattr(observers, kind)))
        prepared(x)
        converted = flow.convert_pt2e(prepared)
        targets = [str(n.target) for n in converted.graph.nodes if n.op == "call_function"]
        results.append((converted(x), targets))
    (mine, my_targets), (theirs, their_targets) = results
    assert torch.equal(mine, theirs)
    dequantizes = [t for t in my_targets if "dequantize_affine" in t]
    assert dequantizes == [t for t in their_targets if "dequantize_affine" in t]
    assert len(dequantizes) == 2
