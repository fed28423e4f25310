"""Which operators does ONNX Runtime compute slower in integers than in float, wherever they stand?

Run `python -m benchmarks.onnx_operators`: least times of sessions called in turn, one thread. Times
of a chain of operators less those of a single one are an operator's own; so are those of single
sessions less an empty one's, where operators cannot follow each other. A class's ratio is the
geometric mean over its shapes of (dequantize + operator + quantize in float) / (integer operator):
below 1 an operator is slower in integers even where it stands between two integer ones. Writes
`backends/onnx/measured/<cpu>.json`, the times by kind and sizes to `<cpu>_times.json` beside it,
and all of them to `benchmarks/results/onnx_operators.json`.
"""

import argparse
import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

import pt2e_quant.backends.onnx
from benchmarks.cpu_times import means
from benchmarks.operator_cases import CASES, Case
from benchmarks.results import read_rows, write_results
from pt2e_quant.backends.measure_speed import times_in_turn
from pt2e_quant.kernels.onednn.speed import cpu_slug

_LINKS = 4
"""Operators of the longer chain."""
_SCALE, _ZERO = 0.02, 128
_NO_RATIO = ("MaxPool", "Shuffle")
"""Their integers are slow with channels first, and with channels last."""
_BORDERS = ("quantize", "dequantize", "reorder", "transpose")
LEAST_US = 0.1
"""No operator is said to take less."""


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
        if case.is_pair:
            read = [self._rounded(self.call(case.op, *read, **dict(case.attributes)))]
            outer, inner, *kernel = case.weight
            read.append(self._weight((inner, outer, *kernel), "weight_back"))
        if case.op == "Shuffle":
            made = self.call("Conv", *read, **dict(case.attributes))
            return self._shuffled(
                self.call("QuantizeLinear", made, "s", "z") if self.is_integer else made
            )
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

    def _shuffled(self, value: str) -> str:
        _, channels, *side = self.case.x
        for name, sizes in (("apart", [1, 2, channels // 2, *side]), ("whole", self.case.x)):
            self.constants.append(numpy_helper.from_array(np.array(sizes, np.int64), name))
        value = self.call("DequantizeLinear", value, "s", "z") if self.is_integer else value
        turned = self.call("Transpose", self.call("Reshape", value, "apart"), perm=[0, 2, 1, 3, 4])
        made = self.call("Reshape", turned, "whole")
        return self.call("QuantizeLinear", made, "s", "z") if self.is_integer else made

    def _rounded(self, value: str) -> str:
        if not self.is_integer:
            return value
        return self.call("DequantizeLinear", self.call("QuantizeLinear", value, "s", "z"), "s", "z")

    def _is_value(self, name: str) -> bool:
        return self.is_integer and not name.startswith("weight")

    def _weight(self, sizes: tuple[int, ...] = (), name: str = "weight") -> str:
        rng = np.random.default_rng(0)
        integers = rng.integers(-127, 128, sizes or self.case.weight).astype(np.int8)
        if not self.is_integer:
            self.constants.append(numpy_helper.from_array(integers.astype(np.float32) / 1e4, name))
            return name
        parts = (integers, np.array(1e-4, np.float32), np.array(0, np.int8))
        names = [f"{name}_{part}" for part in "qsz"]
        self.constants += [
            numpy_helper.from_array(*pair) for pair in zip(parts, names, strict=True)
        ]
        self.nodes.append(helper.make_node("DequantizeLinear", names, [name]))
        return name

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
    if case.op == "Conv" and not case.is_chained:
        found |= {"turn": _turned(case, case.x, (0, 2, 3, 1)), "turn back": _turned_back(case)}
    builder = _Builder(case, is_integer=False)
    found["copy"] = builder.model(builder.call("Identity", "x"), in_type=float_, out_type=float_)
    return found


def _turned(case: Case, x: tuple[int, ...], order: tuple[int, ...]) -> bytes:
    builder = _Builder(replace(case, x=x), is_integer=True)
    value, kind = builder.call("Transpose", "x", perm=order), TensorProto.UINT8
    return builder.model(value, in_type=kind, out_type=kind)


def _turned_back(case: Case) -> bytes:
    strides = dict(case.attributes)["strides"]
    edges = (-(-edge // step) for edge, step in zip(case.x[2:], strides, strict=True))
    return _turned(case, (1, *edges, case.weight[0]), (0, 3, 1, 2))


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
    if case.op == "Shuffle":
        conv = time_case(replace(case, op="Conv"), rounds=rounds, seconds=seconds)
        found |= {form: found[form] - conv[form] for form in ("integer", "float")}
    if case.is_pair:
        found |= {form: found[form] / 2 for form in ("integer", "float")}
    if "turn" in times:
        # It has channels last, which a neighbour would have too.
        found["integer"] -= times["turn"] + times["turn back"] - 2 * empty
    if case.op == "Conv" and case.is_chained:
        # Between the order of a tensor's values and that of blocks of channels, there and back.
        found["reorder"] = (times["float 1"] - own("float") - times["copy"]) / 2
        # And that of channels last, in which it multiplies integers.
        found["transpose"] = (times["integer 1"] - own("integer") - empty) / 2
    return {name: round(max(us, LEAST_US), 2) for name, us in found.items()}


def ratio(us: dict[str, float]) -> float:
    """Speed of the integer operator over float between two integer operators."""
    return (us["float"] + us["quantize"] + us["dequantize"]) / us["integer"]


def timed_rows(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What `backends.target.times` reads: operators and conversions by kind and sizes.

    The changes of layout around an operator that was timed alone are not its own.
    """
    made: list[dict[str, Any]] = []
    for row in rows:
        elements = int(np.prod(row["x"]))
        borders = {form: row[form] for form in _BORDERS if row.get(form, 0.0) > LEAST_US}
        if borders:
            made.append({"kind": "convert", "sizes": [elements], "amount": elements, **borders})
        own = {form: row[form] for form in ("integer", "float")}
        made.append({key: row[key] for key in ("kind", "sizes", "amount")} | own)
        if row["is_pair"]:
            inputs, results, *others = row["sizes"]
            made.append(made[-1] | {"sizes": [results, inputs, *others]})
    return made


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
        rows.append(
            {
                "cpu": cpu_slug(),
                "case": f"{case.name}; {case.x}; {case.weight}",
                "class": case.name,
                "x": case.x,
                "weight": case.weight,
                "kind": case.kind,
                "sizes": case.sizes,
                "amount": case.amount,
                "is_pair": case.is_pair,
                **us,
            }
        )
        if case.op not in _NO_RATIO:
            found.setdefault(case.name, []).append(ratio(us))
        alone = us["float"] / (us["integer"] + us["quantize"] + us["dequantize"])
        print(f"{case.name:58s} {case.x!s:20s} {ratio(us):6.2f} alone {alone:5.2f}", us, flush=True)
    if options.no_write:
        return
    package = Path(pt2e_quant.backends.onnx.__path__[0])
    file = package / "measured" / f"{cpu_slug()}.json"
    file.parent.mkdir(exist_ok=True)
    made = means(found)
    write_results("onnx_operators", rows, ("cpu", "case"))
    if options.only:
        made = json.loads(file.read_text()) | made
        rows = [row for row in read_rows("onnx_operators") if row["cpu"] == cpu_slug()]
    file.write_text(json.dumps(dict(sorted(made.items())), indent=2) + "\n")
    times = file.with_name(f"{cpu_slug()}_times.json")
    lines = ",\n".join(json.dumps(row) for row in timed_rows(rows))
    times.write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main()
