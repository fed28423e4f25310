"""Packed and tied weights in ONNX files."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("onnxruntime", reason="the extra onnx is not installed")

import onnx

import pt2e_quant as pq
from pt2e_quant.core.schemes import INT8_WEIGHT
from pt2e_quant.core.unpack_op import is_unpack


class Mlp(nn.Module):
    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(128, 128), nn.Linear(128, 128)
        if tied:
            self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.relu(self.a(x)))


def converted(*, tied: bool, quant_max: int, pack: bool = True) -> torch.fx.GraphModule:
    torch.manual_seed(0)
    quantizer = pq.backends.get("onnx").quantizer("int8")
    weight = replace(INT8_WEIGHT, quant_min=-quant_max, quant_max=quant_max)
    quantizer.set_global(replace(quantizer.scheme, name="narrow", weight=weight))
    x = torch.randn(4, 128)
    program = torch.export.export(Mlp(tied=tied).eval(), (x,))
    prepared = pq.prepare_pt2e(program, quantizer)
    return pq.convert_pt2e(pq.calibrate(prepared, [(x,)], progress=False), pack=pack)


def test_lower_when_packed_then_the_file_of_unpacked_weights(tmp_path):
    backend = pq.backends.get("onnx")
    x = torch.randn(4, 128)
    results, operators = [], []
    for pack in (True, False):
        gm = converted(tied=False, quant_max=7, pack=pack)
        assert any(is_unpack(n) for n in gm.graph.nodes) == pack
        artifact = backend.lower(gm, verify=False, strict=False)
        artifact.save(tmp_path / "x.onnx")
        operators.append(Counter(n.op_type for n in onnx.load(tmp_path / "x.onnx").graph.node))
        results.append(artifact.run(x))
    assert torch.equal(*results)
    assert operators[0] == operators[1]


@pytest.mark.parametrize("quant_max", [127, 7])
def test_lower_when_tied_then_one_initializer(quant_max, tmp_path):
    sizes = {}
    for tied in (True, False):
        artifact = pq.backends.get("onnx").lower(
            converted(tied=tied, quant_max=quant_max), verify=False, strict=False
        )
        artifact.save(tmp_path / "x.onnx")
        model = onnx.load(tmp_path / "x.onnx")
        large = [i for i in model.graph.initializer if 128 * 128 in (torch.Size(i.dims).numel(),)]
        assert len(large) == 2 - tied
        sizes[tied] = artifact.size_bytes
    stored = 128 * 128
    assert sizes[False] - sizes[True] > 0.45 * stored
