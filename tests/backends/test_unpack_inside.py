import torch
from torch import nn

import pt2e_quant as pq
from pt2e_quant.backends.cpu.backend import BACKEND as CPU
from pt2e_quant.backends.edited_copy import unpack_inside
from pt2e_quant.core.qdq import is_dequantize
from pt2e_quant.core.unpack_op import is_unpack
from pt2e_quant.graph.pipeline import run_passes


class Cond(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x):
        return self.a(torch.cond(x.sum() > 0, lambda x: self.b(x), lambda x: self.b(x) * 2, (x,)))


def converted(recipe):
    torch.manual_seed(0)
    x = torch.randn(4, 32)
    program = torch.export.export(Cond().eval(), (x,))
    return pq.convert_pt2e(pq.prepare_pt2e(program, CPU.allowing_slower().quantizer(recipe))), x


def unpacks(gm):
    return [n for n in gm.graph.nodes if is_unpack(n)]


def test_operand_when_packed_and_read_in_bodies_then_unpacked_inside():
    gm, x = converted("w4_g32")
    expected = [gm(x), gm(-x)]
    before = len(unpacks(gm))
    (record,) = run_passes(gm, (unpack_inside,), verify=True, sample=((x,), {}))
    assert record.changed
    assert 0 < len(unpacks(gm)) < before
    assert all(is_dequantize(user) for node in unpacks(gm) for user in node.users)
    for body in (gm.true_graph_0, gm.false_graph_0):
        assert {node.args[0].op for node in unpacks(body)} == {"placeholder"}
    assert all(torch.equal(a, b) for a, b in zip(expected, [gm(x), gm(-x)], strict=True))
    assert not unpack_inside(gm).changed


def test_operand_when_not_packed_then_left():
    gm, _ = converted("w8")
    assert not unpack_inside(gm).changed
