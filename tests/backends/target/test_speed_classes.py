"""The classes of sizes that speeds on a runtime are kept by."""

import pytest
import torch
from torch import nn

from benchmarks.onnx_operators import ratio, time_case
from benchmarks.operator_cases import CASES
from pt2e_quant.backends.target import speed_classes
from pt2e_quant.backends.target.speed_classes import ratio_here, shape_class

POOL = "avg_pool2d, < 4096 elements"


def node_of(module, *shapes):
    """The operator of a program of one."""
    program = torch.export.export(module.eval(), tuple(torch.randn(shape) for shape in shapes))
    return next(n for n in program.graph.nodes if n.op == "call_function")


class Gate(nn.Module):
    def forward(self, x, gate):
        return x * gate


@pytest.mark.parametrize(
    ("module", "shapes", "name"),
    [
        (
            nn.Conv2d(1, 64, (512, 1), (4, 1), (254, 0)),
            [(1, 1, 1024, 1)],
            "conv, < 4 channels, kernel long, < 4096 positions",
        ),
        (
            nn.Conv2d(8, 8, 5, padding=2, groups=8),
            [(1, 8, 20, 20)],
            "conv, depthwise, kernel wide, < 4096 positions",
        ),
        (
            nn.Conv1d(8, 16, 3, groups=2),
            [(1, 8, 66)],
            "conv, grouped, < 16 channels, kernel <= 9, < 256 positions",
        ),
        (nn.Linear(64, 64), [(2, 4, 64)], "linear, < 16 rows, < 16384 weights"),
        (Gate(), [(1, 16, 20, 20), (1, 16, 1, 1)], "mul by a gate, < 65536 elements"),
        (Gate(), [(1, 16, 8, 8), (1, 16, 8, 8)], "mul, < 4096 elements"),
        (nn.AvgPool2d(3), [(1, 4, 8, 8)], POOL),
        (nn.GELU(), [(4, 4)], None),
    ],
)
def test_shape_class_when_an_operator_is_measured_then_its_sizes_name_it(module, shapes, name):
    assert shape_class(node_of(module, *shapes)) == name


def test_shape_class_when_a_size_is_dynamic_then_the_example_names_it():
    batch = ({0: torch.export.Dim.DYNAMIC},)
    x = torch.randn(4, 64)
    program = torch.export.export(nn.Linear(64, 64), (x,), dynamic_shapes=batch)
    node = next(n for n in program.graph.nodes if n.op == "call_function")
    assert not isinstance(node.meta["val"].shape[0], int)
    assert shape_class(node) == "linear, < 16 rows, < 16384 weights"


def test_shape_class_when_no_example_knows_a_size_then_none():
    class Picked(nn.Module):
        def forward(self, x):
            return x[x > 0] * 2

    program = torch.export.export(Picked(), (torch.randn(8),))
    node = next(n for n in program.graph.nodes if n.target is torch.ops.aten.mul.Tensor)
    assert shape_class(node) is None


def test_ratio_here_when_the_class_was_measured_then_its_ratio(monkeypatch):
    monkeypatch.setattr(speed_classes, "read_ratios", lambda package, path: {POOL: 0.25})
    assert ratio_here(node_of(nn.AvgPool2d(3), (1, 4, 8, 8)), "onnx") == 0.25
    assert ratio_here(node_of(nn.Softmax(-1), (4, 4)), "onnx") is None


def test_ratio_here_when_no_cpu_like_this_was_measured_then_none(monkeypatch):
    monkeypatch.setattr(speed_classes, "measured_cpu", lambda package, path: "cpu_of_nobody")
    assert ratio_here(node_of(nn.AvgPool2d(3), (1, 4, 8, 8)), "onnx") is None


def test_cases_when_timed_then_an_average_pool_of_integers_is_slower():
    case = next(c for c in CASES if c.name == "avg_pool2d, < 65536 elements")
    assert ratio(time_case(case, rounds=5, seconds=1.0)) < 0.5
