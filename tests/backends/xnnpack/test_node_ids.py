"""Where the values of nodes are made, among the numbered operators of a file."""

from collections import Counter

import torch
from torch import nn
from torch.export import export
from torch.nn import functional

from pt2e_quant.backends.artifact import ShownNode
from pt2e_quant.backends.xnnpack.contents import DelegateOp, ProgramContents
from pt2e_quant.backends.xnnpack.node_ids import Handles, node_ids


def operator(name, handle):
    return DelegateOp(name=name, inputs=("qint8",), output="qint8", handle=handle)


def test_node_ids_when_operators_are_fused_split_and_converted_then_each_value_has_its_maker():
    first = (operator("Convert", 1), operator("Conv2d", 2), operator("Convert", 2))
    second = (operator("Convert", 4), operator("Sigmoid", 5), operator("Multiply", 5))
    contents = ProgramContents(
        delegates=(first, second), kernels=Counter(), places=((0, 0), (0, 2))
    )
    names = {1: "x", 2: "conv2d", 3: "relu", 4: "atan", 5: "silu", 6: "pad"}
    handles = Handles(nodes=names, clamped={3: 2})
    handles = handles.emitted({0: [2, 3], 1: 4, 2: [5]})
    assert node_ids(contents, handles, "a.pte") == {
        "x": ShownNode(graph="a.pte::forward_0_0", node="0"),
        "conv2d": ShownNode(graph="a.pte::forward_0_0", node="1"),
        "relu": ShownNode(graph="a.pte::forward_0_0", node="1"),
        "atan": ShownNode(graph="forward", node="forward_0_1"),
        "silu": ShownNode(graph="a.pte::forward_0_2", node="2"),
    }


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return torch.atan(functional.gelu(self.linear(x)))


def test_floats_when_an_operator_is_outside_or_reads_floats_then_named():
    real = DelegateOp(name="Gelu", inputs=("fp32",), output="fp32", handle=3)
    cast = DelegateOp(name="Convert", inputs=("fp32",), output="qint8", handle=1)
    # A pass put a factor for each channel behind the linear, which has the linear's handle.
    factor = DelegateOp(name="Multiply", inputs=("fp32",), output="fp32", handle=2)
    handles = Handles(nodes={1: "x", 2: "linear", 3: "gelu", 4: "atan"}, clamped={})
    gm = export(Net().eval(), (torch.randn(2, 4),)).module()
    operators = (cast, operator("FullyConnected", 2), factor, real)
    assert handles.floats(gm, operators, [4]) == {"gelu", "atan"}
    assert handles.floats(gm, (cast, factor, real), [4]) == {"linear", "gelu", "atan"}
