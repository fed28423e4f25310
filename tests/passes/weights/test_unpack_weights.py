"""The inverse of packing; test_pack_weights.py holds it to every dtype and group."""

import copy

import pytest
import torch
from torch import nn
from torch.fx import GraphModule

from pt2e_quant.core.canonical import verify_canonical
from pt2e_quant.core.errors import InvariantError
from pt2e_quant.core.packing import pack
from pt2e_quant.core.unpack_op import Unpack
from pt2e_quant.graph.pipeline import run_passes
from pt2e_quant.graph.show import show
from pt2e_quant.passes.cleanup.strip_guards import strip_guards
from pt2e_quant.passes.weights.unpack_weights import nothing_packed, unpack_weights


def captured(model: nn.Module, *args: torch.Tensor) -> GraphModule:
    gm = torch.export.export(model.eval(), args).module()
    strip_guards(gm)
    return gm


class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer(
            "weight_q_packed", pack(torch.tensor([[1, -2, 3], [-8, 7, 0]]), torch.int4)
        )
        self.register_buffer("scale", torch.tensor([0.5, 2.0]))
        self.register_buffer("zero_point", torch.zeros(2, dtype=torch.int64))

    def forward(self, x):
        q = Unpack(self.weight_q_packed, 4, True, [2, 3])
        limits = 0, -8, 7, torch.int8
        weight = torch.ops.quantized_decomposed.dequantize_per_channel(
            q, self.scale, self.zero_point, *limits
        )
        return x @ weight.t()


def test_unpack_when_run_then_golden_text_and_the_same_numbers():
    gm = captured(Packed(), torch.ones(2, 3))
    x = torch.randn(2, 3)
    expected = gm(x)
    (record,) = run_passes(gm, (unpack_weights,), verify=True)
    assert [n.text for n in record.notes] == ["weight_q: torch.int8[2, 3]"]
    assert show(gm).splitlines()[1].endswith("(weight_q, scale, zero_point, 0, -8, 7, i8)")
    assert gm.weight_q.tolist() == [[1, -2, 3], [-8, 7, 0]]
    assert torch.equal(gm(x), expected)


def test_unpack_when_nothing_is_packed_then_declines():
    gm = captured(nn.Linear(2, 2), torch.ones(1, 2))
    (record,) = run_passes(gm, (unpack_weights,))
    assert not record.changed
    assert record.notes == ()


def test_unpack_when_done_then_the_packed_tensors_of_the_other_graph_stay():
    gm = captured(Packed(), torch.ones(2, 3))
    held = gm.weight_q_packed
    kept = held.clone()
    work = GraphModule(gm, copy.deepcopy(gm.graph))
    run_passes(work, (unpack_weights,))
    assert nothing_packed.check(work) is None
    assert nothing_packed.check(gm) == "unpack left"
    assert gm.weight_q_packed is held
    assert torch.equal(held, kept)
    assert not hasattr(work, "weight_q_packed")
    text = show(work)
    assert not unpack_weights(work).changed
    assert show(work) == text


class Misplaced(nn.Module):
    def forward(self, packed):
        return Unpack(packed, 4, True, [2, 2])


def test_unpack_when_its_input_is_no_constant_then_refused_by_name():
    gm = captured(Misplaced(), torch.zeros(2, 1, dtype=torch.uint8))
    with pytest.raises(InvariantError, match=r"no constant[^$]*unpack"):
        unpack_weights(gm)
    with pytest.raises(InvariantError, match="elsewhere than from constant to dequantize"):
        verify_canonical(gm)


def test_verify_when_an_unpacked_constant_is_read_by_arithmetic_then_refused():
    class Read(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("packed", torch.zeros(2, 1, dtype=torch.uint8))

        def forward(self, x):
            return x + Unpack(self.packed, 4, True, [2, 2])

    with pytest.raises(InvariantError, match="elsewhere than from constant to dequantize"):
        verify_canonical(captured(Read(), torch.zeros(2, 2)))
