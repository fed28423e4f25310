"""verify_canonical names what breaks the contract."""

import pytest
import torch
from torch import nn
from torch.export import export

from pt2e_quant.backends.cpu.backend import BACKEND as CPU
from pt2e_quant.core.canonical import Form, verify_canonical
from pt2e_quant.core.errors import InvariantError
from pt2e_quant.core.qdq import FLOAT_NAME_KEY, float_name
from pt2e_quant.flow.convert.convert_pt2e import convert_pt2e
from pt2e_quant.flow.prepare.prepare_pt2e import prepare_pt2e
from pt2e_quant.passes.weights.unpack_weights import unpack_weights

_lib = torch.ops.quantized_decomposed
_LIMITS = (-128, 127, torch.int8)


class Quantized(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("weight_q", torch.ones(3, 3, dtype=torch.int8))

    def forward(self, x):
        q = _lib.quantize_per_tensor(x, 0.1, 0, *_LIMITS)
        w = _lib.dequantize_per_tensor(self.weight_q, 0.1, 0, *_LIMITS)
        return torch.nn.functional.linear(_lib.dequantize_per_tensor(q, 0.1, 0, *_LIMITS), w)


@pytest.fixture
def gm():
    return export(Quantized(), (torch.randn(2, 3),)).module(check_guards=False)


def _find(gm, target):
    return next(n for n in gm.graph.nodes if n.target is target)


def test_verify_when_the_graph_is_canonical_then_passes(gm):
    verify_canonical(gm)


def test_verify_when_an_observer_is_left_then_refused(gm):
    gm.add_submodule("left_over", nn.Identity())
    node = _find(gm, torch.ops.aten.linear.default)
    with gm.graph.inserting_after(node):
        gm.graph.call_module("left_over", (node,))
    with pytest.raises(InvariantError, match="module or method call is left"):
        verify_canonical(gm)


def test_verify_when_a_constant_is_dead_then_refused(gm):
    gm.register_buffer("unused", torch.ones(1))
    with gm.graph.inserting_before(next(iter(gm.graph.nodes))):
        gm.graph.get_attr("unused")
    with pytest.raises(InvariantError, match="constant that nothing reads"):
        verify_canonical(gm)


def test_float_twin_when_its_integers_are_registered_as_its_own_then_named(gm):
    gm.register_buffer("weight", torch.ones(3, 3))
    verify_canonical(gm)  # a suffix says nothing: a user's buffer may be called weight_q
    node = next(n for n in gm.graph.nodes if n.op == "get_attr")
    node.meta[FLOAT_NAME_KEY] = "weight"
    with pytest.raises(InvariantError, match="still there in float"):
        verify_canonical(gm)


def test_float_twin_when_converted_and_packed_then_registered_by_every_pass():
    net, x = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).eval(), torch.randn(2, 64)
    quantizer = CPU.allowing_slower().quantizer("w4_g32")
    gm = convert_pt2e(prepare_pt2e(export(net, (x,)), quantizer))
    for _ in range(2):
        held = [n for n in gm.graph.nodes if n.op == "get_attr" and FLOAT_NAME_KEY in n.meta]
        assert {float_name(n) for n in held} >= {"0.weight", "1.weight"}
        unpack_weights(gm)
    gm.get_submodule("0").register_buffer("weight", torch.ones(64, 64))
    with pytest.raises(InvariantError, match="still there in float"):
        verify_canonical(gm)


def test_verify_when_another_op_reads_integers_then_refused(gm):
    node = _find(gm, _lib.quantize_per_tensor.default)
    with gm.graph.inserting_after(node):
        gm.graph.call_function(torch.ops.aten.abs.default, (node,))
    with pytest.raises(InvariantError, match="read by something else"):
        verify_canonical(gm)


def test_verify_when_a_dequantize_reads_floats_then_refused(gm):
    x = next(n for n in gm.graph.nodes if n.op == "placeholder")
    quantize = _find(gm, _lib.quantize_per_tensor.default)
    quantize.replace_all_uses_with(x)
    gm.graph.erase_node(quantize)
    with pytest.raises(InvariantError, match="no integer tensor"):
        verify_canonical(gm)


def test_verify_when_a_float_constant_is_quantized_then_only_unfolded(gm):
    gm.register_buffer("c", torch.ones(3, 3))
    old = next(n for n in gm.graph.nodes if n.target == "weight_q")
    dequantize = next(iter(old.users))
    with gm.graph.inserting_before(dequantize):
        c = gm.graph.get_attr("c")
        q = gm.graph.call_function(_lib.quantize_per_tensor.default, (c, 0.1, 0, *_LIMITS))
    q.meta["val"] = old.meta["val"]
    dequantize.args = (q, *dequantize.args[1:])
    gm.graph.erase_node(old)
    verify_canonical(gm, form=Form.UNFOLDED)
    with pytest.raises(InvariantError, match="stored in float with a quantize"):
        verify_canonical(gm)


def test_verify_when_the_graph_is_torchaos_own_then_the_fix_names_our_convert(gm):
    gm.meta.pop("pt2e_quant.provenance", None)
    dequantize = _find(gm, _lib.dequantize_per_tensor.default)
    dequantize.args = (_find(gm, torch.ops.aten.linear.default), *dequantize.args[1:])
    with pytest.raises(InvariantError, match=r"pq\.convert_pt2e, which take the same quantizers"):
        verify_canonical(gm)
