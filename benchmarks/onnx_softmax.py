"""How much faster is ONNX Runtime's softmax of channels with rows and columns joined to one axis?

Run `python -m benchmarks.onnx_softmax`. ONNX Runtime's Softmax takes another axis than the last by
two transposes, and has a fast one for two axes that change places. Medians of sessions called in
turn on one thread, in microseconds; `written` is by a maximum, a sum and a quotient.
"""

import statistics
from collections.abc import Callable

import numpy as np
from onnx import NodeProto, helper

from benchmarks.onnx_nodes import bind_nodes
from benchmarks.results import write_results
from pt2e_quant.backends.measure_speed import times_in_turn

CHANNELS = (2, 8, 21, 64)
SIDES = (4, 8, 16, 32, 64, 128)
LARGEST = 1 << 19


def _joined(op: str) -> list[NodeProto]:
    return [
        helper.make_node("Reshape", ["x", "flat"], ["f"]),
        helper.make_node(op, ["f"], ["s"], axis=1),
        helper.make_node("Reshape", ["s", "shape"], ["y"]),
    ]


FORMS: dict[str, list[NodeProto]] = {
    "softmax": [helper.make_node("Softmax", ["x"], ["y"], axis=1)],
    "softmax_joined": _joined("Softmax"),
    "softmax_written": [
        helper.make_node("ReduceMax", ["x", "axis"], ["m"], keepdims=1),
        helper.make_node("Sub", ["x", "m"], ["d"]),
        helper.make_node("Exp", ["d"], ["e"]),
        helper.make_node("ReduceSum", ["e", "axis"], ["s"], keepdims=1),
        helper.make_node("Div", ["e", "s"], ["y"]),
    ],
    "log_softmax": [helper.make_node("LogSoftmax", ["x"], ["y"], axis=1)],
    "log_softmax_joined": _joined("LogSoftmax"),
}


def _call(nodes: list[NodeProto], size: tuple[int, ...]) -> Callable[[], object]:
    constants = {"axis": [1], "flat": [0, 0, -1], "shape": list(size)}
    held = {name: np.array(values, np.int64) for name, values in constants.items()}
    values = np.random.default_rng(0).standard_normal(size, np.float32)
    return bind_nodes(nodes, {"x": values}, held)


def measure(channels: int, side: int) -> dict[str, object]:
    """Microseconds of each form along the channels of a square image."""
    calls = [_call(nodes, (1, channels, side, side)) for nodes in FORMS.values()]
    medians = map(statistics.median, times_in_turn(calls, rounds=200, seconds=2))
    us = {form: round(time, 1) for form, time in zip(FORMS, medians, strict=True)}
    return {"channels": channels, "side": side, "us": us}


def main() -> None:
    """Measure, print, write."""
    sizes = [(c, side) for c in CHANNELS for side in SIDES if c * side**2 <= LARGEST]
    rows = [measure(*size) for size in sizes]
    for row in rows:
        print(row)
    write_results("onnx_softmax", rows, ("channels", "side"))


if __name__ == "__main__":
    main()
