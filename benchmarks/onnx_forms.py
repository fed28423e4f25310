"""Which float functions does ONNX Runtime compute faster out of several operators than by one?

Run `python -m benchmarks.onnx_forms`. Medians of sessions called in turn on one thread, in
microseconds; the forms are those of `backends/onnx/translate/activations.py`.
"""

import statistics
from collections.abc import Callable

import numpy as np
from onnx import NodeProto, helper

from benchmarks.onnx_nodes import bind_nodes
from benchmarks.results import write_results
from pt2e_quant.backends.measure_speed import times_in_turn

SIZES = ((1, 16, 14, 14), (1, 64, 32, 32), (1, 96, 56, 56), (1, 512, 1, 768))
_NUMBERS = {"zero": 0.0, "half": 0.5, "one": 1.0, "two": 2.0, "most": 20.0}


def _node(op: str, inputs: str, output: str = "y", **attributes: float) -> NodeProto:
    return helper.make_node(op, inputs.split(), [output], **attributes)


FORMS: dict[str, tuple[list[NodeProto], list[NodeProto]]] = {
    "softplus": (
        [_node("Softplus", "x")],
        [
            _node("Abs", "x", "a"),
            _node("Neg", "a", "n"),
            _node("Exp", "n", "u"),
            _node("Add", "u one", "w"),
            _node("Sub", "w one", "v"),
            _node("Sub", "u v", "d"),
            _node("Div", "d w", "c"),
            _node("Log", "w", "l"),
            _node("Add", "l c", "p"),
            _node("Relu", "x", "r"),
            _node("Add", "r p"),
        ],
    ),
    "mish": (
        [_node("Softplus", "x", "s"), _node("Tanh", "s", "t"), _node("Mul", "x t")],
        [
            _node("Min", "x most", "m"),
            _node("Exp", "m", "e"),
            _node("Add", "e two", "f"),
            _node("Mul", "e f", "g"),
            _node("Add", "g two", "d"),
            _node("Div", "g d", "q"),
            _node("Mul", "x q"),
        ],
    ),
    "prelu": (
        [_node("PRelu", "x slope")],
        [
            _node("Min", "x zero", "m"),
            _node("Sub", "slope one", "s"),
            _node("Mul", "m s", "p"),
            _node("Add", "x p"),
        ],
    ),
    "mean of rows": (
        [_node("ReduceMean", "x axis")],
        [
            _node("Reshape", "x flat", "r"),
            _node("MatMul", "ones r", "m"),
            _node("Div", "m count"),
        ],
    ),
    "square root": ([_node("Pow", "x half")], [_node("Sqrt", "x")]),
}
"""Of each function the operator, or what it is exported as, and the other form."""


def _call(
    nodes: list[NodeProto], size: tuple[int, ...], *, is_positive: bool
) -> Callable[[], object]:
    constants = {name: np.array(n, np.float32) for name, n in _NUMBERS.items()}
    constants["count"] = np.array(size[1], np.float32)
    constants["ones"] = np.ones((1, size[1]), np.float32)
    constants["axis"] = np.array([1], np.int64)
    constants["flat"] = np.array([0, 0, -1], np.int64)
    constants["slope"] = np.linspace(0.1, 0.4, size[1], dtype=np.float32).reshape(-1, 1, 1)
    values = np.random.default_rng(0).standard_normal(size, np.float32)
    return bind_nodes(nodes, {"x": np.abs(values) if is_positive else values}, constants)


def measure(name: str, size: tuple[int, ...]) -> dict[str, object]:
    """Microseconds of both forms, whose results are close."""
    calls = [_call(nodes, size, is_positive="root" in name) for nodes in FORMS[name]]
    (first,), (second,) = (call() for call in calls)
    np.testing.assert_allclose(first.ravel(), second.ravel(), rtol=1e-5, atol=1e-6)
    one, several = map(statistics.median, times_in_turn(calls, rounds=200, seconds=2))
    return {
        "function": name,
        "size": " x ".join(map(str, size)),
        "operator_us": round(one, 1),
        "form_us": round(several, 1),
        "times_as_fast": round(one / several, 2),
    }


def main() -> None:
    """Measure, print, write."""
    rows = [measure(name, size) for name in FORMS for size in SIZES]
    for row in rows:
        print(row)
    write_results("onnx_forms", rows, ("function", "size"))


if __name__ == "__main__":
    main()
