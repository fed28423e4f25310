"""Errors say where and how to mend."""

import pickle

import torch
from torch import nn
from torch.export import export

from pt2e_quant.core.errors import (
    InputError,
    MissingExtraError,
    UnsupportedError,
    near,
)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = nn.Sequential(nn.Linear(2, 2))

    def forward(self, x):
        return self.block(x)


def test_error_adds_node_module_and_source():
    gm = export(Net(), (torch.randn(1, 2),)).module()
    (node,) = [n for n in gm.graph.nodes if n.op == "call_function"]
    text = str(UnsupportedError("no such thing", node=node, rule="row 3", fix="leave it"))
    assert text.splitlines()[0] == "no such thing"
    assert "  node    linear (aten.linear.default)" in text
    assert "  module  block.0" in text
    assert "  source  " in text
    assert "  rule    row 3" in text
    assert "  fix     leave it" in text


def test_errors_pickle():
    made = pickle.loads(pickle.dumps(InputError("bad", fix="good")))
    assert (str(made), made.fix) == (str(InputError("bad", fix="good")), "good")
    extra = pickle.loads(pickle.dumps(MissingExtraError("onnx", "onnxscript")))
    assert "pip install 'pt2e-quant[onnx]'" in str(extra)


def test_near_offers_close_names_first():
    assert near("xnpack", ["onnx", "xnnpack"]).startswith('did you mean "xnnpack"?')
    assert near("zzz", []) == "known: none"
