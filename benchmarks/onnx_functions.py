"""Which form of SiLU, hardswish, ELU and a sigmoid gate does ONNX Runtime run fastest on integers?

Run `python -m benchmarks.onnx_functions`. Each form reads uint8 and gives uint8: in float between a
dequantize and a quantize, ONNX Runtime's own integer operators where it has them, and a look-up
in a table of 256 results. Medians of sessions called in turn on one thread, less an empty session.
"""

import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
from onnx import NodeProto, TensorProto, helper

from benchmarks.onnx_nodes import bind_nodes
from benchmarks.results import write_results
from pt2e_quant.backends.measure_speed import times_in_turn

SIZES = ((1, 16, 14, 14), (1, 32, 28, 28), (1, 96, 56, 56))
_CONSTANTS = {
    "s": np.array(0.02, np.float32),
    "z": np.array(128, np.uint8),
    "s1": np.array(1 / 256, np.float32),
    "z1": np.array(0, np.uint8),
    "table": np.arange(256, dtype=np.uint8),
}
Nodes = list[NodeProto]


def _node(op: str, inputs: str, output: str, **attributes: Any) -> NodeProto:
    domain = "com.microsoft" if op.startswith("QLinear") or op == "QuickGelu" else ""
    return helper.make_node(op, inputs.split(), [output], domain=domain, **attributes)


def _between(*nodes: NodeProto) -> Nodes:
    """In float, of x as `f`, with the result `r`."""
    return [_node("DequantizeLinear", "x s z", "f"), *nodes, _node("QuantizeLinear", "r s z", "y")]


_TABLE = [_node("Cast", "x", "i", to=TensorProto.INT32), _node("Gather", "table i", "y")]
_SIGMOID = _node("Sigmoid", "f", "m")
_IN_INTEGERS = _node("QLinearSigmoid", "x s z s1 z1", "m")
FORMS: dict[str, dict[str, Nodes]] = {
    "silu": {
        "float": _between(_SIGMOID, _node("Mul", "f m", "r")),
        "float, one operator": _between(_node("QuickGelu", "f", "r", alpha=1.0)),
        "integers": [_IN_INTEGERS, _node("QLinearMul", "x s z m s1 z1 s z", "y")],
        "table": _TABLE,
    },
    "hardswish": {"float": _between(_node("HardSwish", "f", "r")), "table": _TABLE},
    "elu": {"float": _between(_node("Elu", "f", "r")), "table": _TABLE},
    "gate": {
        "float": [
            _node("DequantizeLinear", "gate s z", "g"),
            *_between(_node("Sigmoid", "g", "m"), _node("Mul", "f m", "r")),
        ],
        "integers": [
            _node("QLinearSigmoid", "gate s z s1 z1", "m"),
            _node("QLinearMul", "x s z m s1 z1 s z", "y"),
        ],
    },
}
"""By function and form; a gate has one value a channel."""


def _call(nodes: Nodes, size: tuple[int, ...]) -> Callable[[], object]:
    rng = np.random.default_rng(0)
    shapes = {"x": size, "gate": (*size[:2], 1, 1)}
    feeds = {name: rng.integers(0, 256, shape, np.uint8) for name, shape in shapes.items()}
    return bind_nodes(nodes, feeds, _CONSTANTS)


def measure(name: str, size: tuple[int, ...]) -> dict[str, object]:
    """Microseconds of each form of a function."""
    forms = {**FORMS[name], "empty": [_node("Identity", "x", "y")]}
    calls = [_call(nodes, size) for nodes in forms.values()]
    medians = map(statistics.median, times_in_turn(calls, rounds=400, seconds=3))
    found = dict(zip(forms, medians, strict=True))
    empty = found.pop("empty")
    us = {form: round(max(time - empty, 0.1), 1) for form, time in found.items()}
    return {"function": name, "x": size, "us": us}


def main() -> None:
    """Measure, print, write."""
    rows = [measure(name, size) for name in FORMS for size in SIZES]
    for row in rows:
        print(row)
    write_results("onnx_functions", rows, ("function", "x"))


if __name__ == "__main__":
    main()
