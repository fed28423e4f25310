"""Errors say where and how to mend."""

import pickle
from enum import Enum

import pytest
import torch
from torch import nn
from torch.export import export

from pt2e_quant.core.errors import (
    ArgumentError,
    ConfigError,
    InputError,
    MissingExtraError,
    OverwrittenError,
    Pt2eQuantError,
    RangeError,
    SchemeError,
    UnsupportedError,
    member_named,
    near,
    source_line,
)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = nn.Sequential(nn.Linear(2, 2))

    def forward(self, x):
        return self.block(x)


def test_error_when_given_a_node_then_adds_node_module_and_source():
    gm = export(Net(), (torch.randn(1, 2),)).module()
    (node,) = [n for n in gm.graph.nodes if n.op == "call_function"]
    text = str(UnsupportedError("no such thing", node=node, rule="row 3", fix="leave it"))
    assert text.splitlines()[0] == "no such thing"
    assert "  node    linear (aten.linear.default)" in text
    assert "  module  block.0" in text
    assert "  source  test_errors.py:" in text
    assert "return self.block(x)" in text  # not the line of torch's own nn.Linear
    assert "  rule    row 3" in text
    assert "  fix     leave it" in text


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (["/home/me/net.py", "/opt/lib/python3.11/site-packages/torch/nn/linear.py"], "net.py:1"),
        (["C:\\me\\net.py", "C:\\site-packages\\torch\\nn\\linear.py"], "net.py:1"),
        (["/home/me/net.py", "/venv/site-packages/transformers/bert.py"], "bert.py:2"),
        ([f"{torch.__path__[0]}/nn/linear.py"], "linear.py:1"),
        ([], ""),
    ],
)
def test_source_when_torch_called_last_then_the_line_before_it(files, expected):
    node = torch.fx.Graph().placeholder("x")
    frames = [f'File "{f}", line {i}, in forward\n    y = x' for i, f in enumerate(files, 1)]
    node.meta["stack_trace"] = "\n  ".join(frames)
    assert source_line(node) == (f"{expected}  y = x" if expected else "")


def test_error_when_pickled_then_text_and_fix_stay():
    made = pickle.loads(pickle.dumps(InputError("bad", fix="good")))
    assert (str(made), made.fix) == (str(InputError("bad", fix="good")), "good")
    extra = pickle.loads(pickle.dumps(MissingExtraError("onnx", "onnxscript")))
    assert "pip install 'pt2e-quant[onnx]'" in str(extra)


@pytest.mark.parametrize(
    ("refused", "builtin"),
    [
        (ArgumentError, ValueError),
        (RangeError, AssertionError),
        (SchemeError, NotImplementedError),
        (OverwrittenError, RuntimeError),
    ],
)
def test_error_when_torchao_raises_a_builtin_then_caught_as_that_too(refused, builtin):
    error = pickle.loads(pickle.dumps(refused("bad", fix="good")))
    assert isinstance(error, builtin)
    assert isinstance(error, Pt2eQuantError)
    assert str(error) == "bad\n  fix     good"


def test_near_when_names_are_close_then_offered_first():
    assert near("xnpack", ["onnx", "xnnpack"]).startswith('did you mean "xnnpack"?')
    assert near("zzz", []) == "known: none"


def test_member_when_there_is_none_then_near_names_are_offered():
    class Colour(Enum):
        RED = "red"

    assert member_named(Colour, "red", "colour") is member_named(Colour, Colour.RED, "colour")
    with pytest.raises(ConfigError, match='there is no colour "rod": did you mean "red"'):
        member_named(Colour, "rod", "colour")
