"""Which operators does ONNX Runtime compute slower in integers than in float, wherever they stand?

Run `python -m benchmarks.onnx_operators`: least times of sessions called in turn, one thread. Times
of a chain of operators less those of a single one are an operator's own; so are those of single
sessions less an empty one's, where operators cannot follow each other. A class's ratio is the
geometric mean over its shapes of (dequantize + operator + quantize in float) / (integer operator):
below 1 an operator is slower in integers even where it stands between two integer ones. Writes
`backends/onnx/measured/<cpu>.json`, and all times to `benchmarks/results/onnx_operators.json`.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

import pt2e_quant.backends.onnx
from benchmarks.cpu_times import means
from pt2e_quant.backends.measure_speed import times_in_turn
from pt2e_quant.backends.target.speed_classes import (
    conv_class,
    light_class,
    linear_class,
    transposed_class,
)
from pt2e_quant.kernels.onednn.speed import cpu_slug

__all__ = ["CASES", "Case", "models", "time_case"]

_LINKS = 4
"""Operators of the longer chain."""
_SCALE, _ZERO = 0.02, 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One operator and its sizes.

    Args:
        name: its class.
        op: of ONNX.
        x: sizes of what it reads.
        weight: sizes of its weight; none: it has no weight.
        gate: sizes of its other operand, which is computed too.
        attributes: of the operator.
        is_chained: whether it can read its own result.
        gives_float: whether its result stays float.
    """

    name: str
    op: str
    x: tuple[int, ...]
    weight: tuple[int, ...] = ()
    gate: tuple[int, ...] = ()
    attributes: tuple[tuple[str, Any], ...] = ()
    is_chained: bool = True
    gives_float: bool = False


def _conv(channels: int, size: tuple[int, ...], kernel: tuple[int, ...], groups: int = 1) -> Case:
    weight = (channels, channels // groups, *kernel)
    pads = [k // 2 for k in kernel] + [(k - 1) // 2 for k in kernel]
    positions = int(np.prod(size))
    return Case(
        name=conv_class(groups=groups, weight=weight, positions=positions),
        op="Conv",
        x=(1, channels, *size),
        weight=weight,
        attributes=(("group", groups), ("pads", pads)),
    )


def _stem(
    channels: int, results: int, size: tuple[int, int], kernel: tuple[int, int], stride: int
) -> Case:
    """A convolution of few channels, which cannot read its own result."""
    weight = (results, channels, *kernel)
    pads = [k // 2 for k in kernel] + [(k - 1) // 2 for k in kernel]
    strides = [stride if edge > 1 else 1 for edge in size]
    positions = int(np.prod([-(-edge // step) for edge, step in zip(size, strides, strict=True)]))
    return Case(
        name=conv_class(groups=1, weight=weight, positions=positions),
        op="Conv",
        x=(1, channels, *size),
        weight=weight,
        attributes=(("strides", strides), ("pads", pads)),
        is_chained=False,
    )


def _transposed(inputs: int, results: int, side: int, kernel: int, groups: int = 1) -> Case:
    """A transposed convolution of stride 2 that doubles its image."""
    weight = (inputs, results // groups, kernel, kernel)
    name = transposed_class(groups=groups, weight=weight, stride=(2, 2), positions=side * side)
    pads = [(kernel - 1) // 2] * 4
    attributes = (("strides", [2, 2]), ("pads", pads), ("output_padding", [kernel % 2] * 2))
    return Case(
        name=name,
        op="ConvTranspose",
        x=(1, inputs, side, side),
        weight=weight,
        attributes=(*attributes, ("group", groups)),
        is_chained=False,
    )


def _linear(rows: int, width: int) -> Case:
    name = linear_class(rows=rows, weight=(width, width))
    sizes, weight = (rows, width), (width, width)
    return Case(name=name, op="MatMul", x=sizes, weight=weight, is_chained=False, gives_float=True)


def _light(name: str, op: str, x: tuple[int, ...], gate: tuple[int, ...] = (), **more: Any) -> Case:
    is_chained = more.pop("is_chained", True)
    is_gate = bool(gate) and gate != x
    made = light_class(name, elements=int(np.prod(x)), is_gate=is_gate)
    attributes = tuple(more.items())
    return Case(name=made, op=op, x=x, gate=gate, attributes=attributes, is_chained=is_chained)


_SIDES = (8, 28, 64)
_IMAGES = ((1, 16, 14, 14), (1, 32, 28, 28), (1, 96, 56, 56))
_POOL = {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1]}


def _cases() -> Iterator[Case]:
    for side in _SIDES:
        for channels in (16, 64):
            for kernel in ((1, 1), (3, 3)):
                yield _conv(channels, (side, side), kernel)
        for kernel in ((1, 1), (5, 5)):
            yield _conv(32, (side, side), kernel)
        for kernel in ((3, 3), (5, 5), (7, 7)):
            yield _conv(64, (side, side), kernel, groups=64)
        yield _conv(64, (side, side), (3, 3), groups=4)
        yield _conv(64, (side, side), (1, 1), groups=4)
    for positions in (32, 512, 4096):
        yield _conv(8, (positions, 1), (64, 1))
        yield _conv(64, (positions, 1), (64, 1))
        yield _conv(64, (positions, 1), (31, 1), groups=64)
    yield _conv(8, (512, 1), (512, 1))
    yield _stem(1, 64, (1024, 1), (512, 1), 4)
    yield _stem(1, 16, (1024, 1), (64, 1), 4)
    yield _stem(1, 16, (1024, 1), (64, 1), 1)
    for side in (16, 64, 160):
        yield _stem(3, 16, (side, side), (3, 3), 2)
        yield _stem(3, 32, (side, side), (7, 7), 2)
        yield _stem(1, 16, (side, side), (3, 3), 1)
    yield from _upsampling()
    for rows in (1, 8, 128):
        for width in (64, 256, 768):
            yield _linear(rows, width)
    for x in _IMAGES:
        gate = (*x[:2], 1, 1)
        for name, op in (("add", "Add"), ("mul", "Mul")):
            yield _light(name, op, x, x)
            yield _light(name, op, x, gate)
        yield _light("sigmoid", "Sigmoid", x)
        yield _light("leaky_relu", "LeakyRelu", x, alpha=0.1)
        yield _light("avg_pool2d", "AveragePool", x, **_POOL)
        yield _light("softmax", "Softmax", (x[2] * x[1] // 8, x[2] * 8), axis=-1)
        yield _light("mean", "GlobalAveragePool", x, is_chained=False)


def _upsampling() -> Iterator[Case]:
    widths = ((16, 32), (16, 16), (32, 16), (64, 32), (96, 64), (128, 64))
    for side in (8, 24, 64):
        for kernel in (2, 3, 4):
            for inputs, results in (*widths, (16, 3), (64, 3), (128, 3)):
                yield _transposed(inputs, results, side, kernel)
        for kernel in (2, 4):
            yield _transposed(64, 64, side, kernel, groups=64)
            yield _transposed(64, 64, side, kernel, groups=4)


CASES = tuple(_cases())


class _Builder:
    """Writes one model of a case."""

    def __init__(self, case: Case, *, is_integer: bool) -> None:
        self.case, self.is_integer = case, is_integer
        self.nodes: list[onnx.NodeProto] = []
        self.constants = [
            numpy_helper.from_array(np.array(_SCALE, np.float32), "s"),
            numpy_helper.from_array(np.array(_ZERO, np.uint8), "z"),
        ]

    def call(self, op: str, *inputs: str, **attributes: Any) -> str:
        name = f"v{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, list(inputs), [name], **attributes))
        return name

    def operator(self, x: str) -> str:
        """A link of the chain: with its dequantizes and its quantize in integers."""
        case = self.case
        if case.op == "ConvTranspose" and self.is_integer:
            return self._as_convolution(x)
        held = [x]
        if case.weight:
            held.append(self._weight())
        if case.gate:
            held.append("gate")
        read = [
            self.call("DequantizeLinear", one, "s", "z") if self._is_value(one) else one
            for one in held
        ]
        made = self.call(case.op, *read, **dict(case.attributes))
        is_left = case.gives_float or not self.is_integer
        return made if is_left else self.call("QuantizeLinear", made, "s", "z")

    def _as_convolution(self, x: str) -> str:
        """A transposed convolution as `shuffle_upsampling` writes it, of the same sizes."""
        inputs, results, kernel, _ = self.case.weight
        given = dict(self.case.attributes)
        groups, width = given["group"], kernel - 1
        pads = {1: [0] * 4, 2: [0, 0, 1, 1], 3: [1] * 4}[width]
        weight = (4 * results * groups, inputs // groups, width, width)
        if kernel % 2:  # no convolution of a graph pads at one end alone
            places = np.array([0, 0, *pads[:2], 0, 0, *pads[2:]], np.int64)
            self.constants.append(numpy_helper.from_array(places, "places"))
            x, pads = self.call("Pad", x, "places", "z"), [0] * 4
        read = [self.call("DequantizeLinear", x, "s", "z"), self._weight(weight)]
        made = self.call("Conv", *read, pads=pads, group=groups)
        made = self.call("QuantizeLinear", made, "s", "z")
        return self.call("DepthToSpace", made, blocksize=2, mode="CRD")

    def _is_value(self, name: str) -> bool:
        return self.is_integer and not name.startswith("weight")

    def _weight(self, sizes: tuple[int, ...] = ()) -> str:
        rng = np.random.default_rng(0)
        integers = rng.integers(-127, 128, sizes or self.case.weight).astype(np.int8)
        if not self.is_integer:
            self.constants.append(
                numpy_helper.from_array(integers.astype(np.float32) / 1e4, "weight")
            )
            return "weight"
        for value, name in (
            (integers, "weight_q"),
            (np.array(1e-4, np.float32), "weight_s"),
            (np.array(0, np.int8), "weight_z"),
        ):
            self.constants.append(numpy_helper.from_array(value, name))
        self.nodes.append(
            helper.make_node("DequantizeLinear", ["weight_q", "weight_s", "weight_z"], ["weight"])
        )
        return "weight"

    def model(self, result: str, *, in_type: int, out_type: int) -> bytes:
        inputs = [helper.make_tensor_value_info("x", in_type, self.case.x)]
        if any("gate" in node.input for node in self.nodes):
            inputs.append(helper.make_tensor_value_info("gate", in_type, self.case.gate))
        outputs = [helper.make_tensor_value_info(result, out_type, None)]
        # A chain's links share one weight.
        named = {c.name: c for c in self.constants}.values()
        nodes = list({tuple(node.output): node for node in self.nodes}.values())
        graph = helper.make_graph(nodes, "g", inputs, outputs, list(named))
        opset = [helper.make_opsetid("", 21)]
        made = helper.make_model(graph, opset_imports=opset, ir_version=10)
        return bytes(made.SerializeToString())


def models(case: Case) -> dict[str, bytes]:
    """The models whose times tell those of the operator, by name."""
    found = {}
    links = (1, _LINKS) if case.is_chained else (1,)
    for is_integer in (True, False):
        kind = TensorProto.UINT8 if is_integer else TensorProto.FLOAT
        for count in links:
            builder = _Builder(case, is_integer=is_integer)
            value = "x"
            for _ in range(count):
                value = builder.operator(value)
            out = TensorProto.FLOAT if case.gives_float else kind
            name = f"{'integer' if is_integer else 'float'} {count}"
            found[name] = builder.model(value, in_type=kind, out_type=out)
    for op in ("QuantizeLinear", "DequantizeLinear", "Identity"):
        builder = _Builder(case, is_integer=False)
        value = builder.call(op, *(("x", "s", "z") if op != "Identity" else ("x",)))
        float_, uint8 = TensorProto.FLOAT, TensorProto.UINT8
        kinds = (uint8, float_) if op == "DequantizeLinear" else (float_, uint8)
        kinds = kinds if op != "Identity" else (uint8, uint8)
        found[op] = builder.model(value, in_type=kinds[0], out_type=kinds[1])
    return found


def time_case(case: Case, *, rounds: int, seconds: float) -> dict[str, float]:
    """Microseconds of an operator in both forms, and of the conversions around it."""
    rng = np.random.default_rng(0)
    calls, names = [], []
    for name, model in models(case).items():
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 3
        session = onnxruntime.InferenceSession(model, options, ["CPUExecutionProvider"])
        feeds = {
            one.name: rng.integers(0, 256, one.shape).astype(
                np.uint8 if one.type == "tensor(uint8)" else np.float32
            )
            for one in session.get_inputs()
        }
        names.append(name)
        calls.append(lambda s=session, f=feeds: s.run(None, f))
    least = map(min, times_in_turn(calls, rounds=rounds, seconds=seconds))
    times = dict(zip(names, least, strict=True))
    empty = times["Identity"]

    def own(kind: str) -> float:
        if case.is_chained:
            return (times[f"{kind} {_LINKS}"] - times[f"{kind} 1"]) / (_LINKS - 1)
        return times[f"{kind} 1"] - empty

    found = {
        "integer": own("integer"),
        "float": own("float"),
        "quantize": 0.0 if case.gives_float else times["QuantizeLinear"] - empty,
        "dequantize": times["DequantizeLinear"] - empty,
    }
    return {name: round(max(us, 0.1), 2) for name, us in found.items()}


def ratio(us: dict[str, float]) -> float:
    """Speed of the integer operator over float between two integer operators."""
    return (us["float"] + us["quantize"] + us["dequantize"]) / us["integer"]


def main() -> None:
    """Measure, print, and write unless told not to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=60, help="timed rounds of each shape")
    parser.add_argument("--seconds", type=float, default=1.0, help="of each shape at most")
    parser.add_argument("--only", default="", help="classes whose names begin so; others are kept")
    parser.add_argument("--no-write", action="store_true", help="print only")
    options = parser.parse_args()
    rows, found = [], {}
    for case in (case for case in CASES if case.name.startswith(options.only)):
        us = time_case(case, rounds=options.rounds, seconds=options.seconds)
        rows.append({"class": case.name, "x": case.x, "weight": case.weight, **us})
        found.setdefault(case.name, []).append(ratio(us))
        alone = us["float"] / (us["integer"] + us["quantize"] + us["dequantize"])
        print(f"{case.name:58s} {case.x!s:20s} {ratio(us):6.2f} alone {alone:5.2f}", us, flush=True)
    if options.no_write:
        return
    package = Path(pt2e_quant.backends.onnx.__path__[0])
    file = package / "measured" / f"{cpu_slug()}.json"
    file.parent.mkdir(exist_ok=True)
    results = Path("benchmarks/results/onnx_operators.json")
    made = means(found)
    if options.only:
        made = json.loads(file.read_text()) | made
        old = json.loads(results.read_text())["rows"]
        rows = [row for row in old if not row["class"].startswith(options.only)] + rows
    file.write_text(json.dumps(dict(sorted(made.items())), indent=2) + "\n")
    result = {"cpu": cpu_slug(), "onnxruntime": onnxruntime.__version__, "rows": rows}
    results.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
