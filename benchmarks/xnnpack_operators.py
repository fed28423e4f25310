"""Which operators does XNNPACK compute slower in integers than in float, wherever they stand?

Run `python -m benchmarks.xnnpack_operators`: medians of programs called in turn, one thread. Each
class is lowered in three forms: int8, float, and float between a dequantize and a quantize, which
is what is left of an operator that stays float among integer ones. Times of a chain of operators
less those of a single one are an operator's own; where operators cannot follow each other, those of
a single one less a quantize of what it reads and a dequantize of its result. A class's ratio is the
geometric mean over its shapes of (float between q/dq) / (int8). Writes
`backends/xnnpack/measured/<cpu>.json`, and all times to
`benchmarks/results/xnnpack_operators.json`.
"""

import argparse
import json
import statistics
import warnings
from collections.abc import Callable, Iterator
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any

import torch
from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower
from executorch.extension.pybindings import portable_lib
from torch import Tensor, nn
from torch.nn import functional

import pt2e_quant.backends.xnnpack
from benchmarks.cpu_times import means
from benchmarks.operator_cases import CASES as ALL_CASES
from benchmarks.operator_cases import Case
from benchmarks.results import write_results
from pt2e_quant.accelerate.executorch_passes import fewer_interpretations
from pt2e_quant.backends.measure_speed import times_in_turn
from pt2e_quant.backends.target.float_retries import Fallback, mark_fallback
from pt2e_quant.backends.target.speed_classes import light_class
from pt2e_quant.backends.xnnpack.load_program import ForwardCall
from pt2e_quant.backends.xnnpack.partition import make_partitioner
from pt2e_quant.backends.xnnpack.table import FUSING, edge_operators
from pt2e_quant.core.qdq import is_qdq
from pt2e_quant.kernels.onednn.speed import cpu_slug

__all__ = ["CASES", "ratio", "time_case"]

_LINKS = 4
"""Operators of the longer chain."""
_STATIC = (0.02, 3, -128, 127, torch.int8)
_Q = torch.ops.quantized_decomposed


class Kind(StrEnum):
    """How the operators of a chain compute."""

    INTEGER = "integer"
    FLOAT = "float"
    BETWEEN = "between"
    """In float, each between a dequantize and a quantize."""


def _functions() -> Iterator[Case]:
    for x in ((1, 16, 14, 14), (1, 32, 28, 28), (1, 96, 56, 56)):
        elements = int(torch.Size(x).numel())
        for name, op in (("tanh", "Tanh"), ("elu", "Elu"), ("hardswish", "HardSwish")):
            yield _function(name, op, x, elements)
        yield _function("gelu", "Gelu", x, elements)


def _function(name: str, op: str, x: tuple[int, ...], elements: int) -> Case:
    found = light_class(name, elements=elements)
    return Case(name=found, op=op, x=x, amount=elements, kind=name, sizes=(elements,))


_OTHERS = ("Softmax", "AveragePool", "MaxPool", "Shuffle", "ConvTranspose")
"""Timed in ONNX Runtime alone."""
_ALL = [
    *(case for case in ALL_CASES if not case.is_pair and case.op not in _OTHERS),
    *_functions(),
]
CASES = tuple({case.name: case for case in reversed(_ALL)}.values())
"""The first shape of each class: lowering takes longer than timing."""

_FUNCTIONS = frozenset({"Sigmoid", "Tanh", "Elu", "Gelu", "HardSwish", "LeakyRelu"})
"""XNNPACK makes look-up tables of them, one of several in a row. Between q/dq too, where it frees
memory twice (ExecuTorch 1.4), so these are not in the table that the lowering reads."""

_OPERATORS: dict[str, Callable[..., Tensor]] = {
    "Add": torch.add,
    "Mul": torch.mul,
    "Sigmoid": torch.sigmoid,
    "Tanh": torch.tanh,
    "Elu": functional.elu,
    "Gelu": functional.gelu,
    "HardSwish": functional.hardswish,
    "MatMul": functional.linear,
    "GlobalAveragePool": partial(torch.mean, dim=(2, 3), keepdim=True),
    "LeakyRelu": partial(functional.leaky_relu, negative_slope=0.1),
}


def _operator(case: Case) -> Callable[..., Tensor]:
    """The operator of a case. Windows of even size pad both sides alike: results grow by one."""
    if case.op != "Conv":
        return _OPERATORS[case.op]
    given = dict(case.attributes)
    pads, groups, strides = given["pads"], given.get("group", 1), given.get("strides", (1, 1))
    return partial(functional.conv2d, padding=tuple(pads[:2]), groups=groups, stride=strides)


class Chain(nn.Module):
    """Operators one behind the other; none: a quantize and a dequantize."""

    def __init__(self, case: Case, kind: Kind, links: int) -> None:
        super().__init__()
        self.case, self.kind, self.links = case, kind, links
        self.call = _operator(case)
        torch.manual_seed(0)
        for at in range(links if case.weight else 0):
            integers = torch.randint(-127, 128, case.weight, dtype=torch.int8)
            is_integer = kind is Kind.INTEGER
            self.register_buffer(f"w{at}", integers if is_integer else integers / 1e4)
            self.register_buffer(f"s{at}", torch.full(case.weight[:1], 1e-4))
            self.register_buffer(f"z{at}", torch.zeros(case.weight[0], dtype=torch.int64))

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        """Map float to float."""
        is_plain = self.kind is Kind.FLOAT
        held = [one if is_plain else self._quantize(one) for one in (x, gate) if one is not None]
        for at in range(self.links):
            operands = [one if is_plain else self._real(one) for one in held]
            made = self.call(*operands, *self._weight(at))
            held[0] = made if is_plain else self._quantize(made)
        return held[0] if is_plain else self._real(held[0])

    def _weight(self, at: int) -> list[Tensor]:
        if not self.case.weight:
            return []
        weight = self.get_buffer(f"w{at}")
        if self.kind is not Kind.INTEGER:
            return [weight]
        qparams = self.get_buffer(f"s{at}"), self.get_buffer(f"z{at}")
        made: Tensor = _Q.dequantize_per_channel(weight, *qparams, 0, -127, 127, torch.int8)
        return [made]

    def _quantize(self, x: Tensor) -> Tensor:
        made: Tensor = _Q.quantize_per_tensor(x, *_STATIC)
        return made

    def _real(self, x: Tensor) -> Tensor:
        made: Tensor = _Q.dequantize_per_tensor(x, *_STATIC)
        return made


def program(case: Case, kind: Kind, links: int, shape: tuple[int, ...]) -> Callable[[], object]:
    """A call of a chain that ExecuTorch runs."""
    inputs = [torch.randn(shape), *([torch.randn(case.gate)] if case.gate else [])]
    chain = Chain(case, kind, links).eval()
    if links == 0:
        inputs = inputs[:1]
    ep = torch.export.export(chain, tuple(inputs))
    if kind is Kind.BETWEEN:
        for node in ep.graph.nodes:
            if node.op == "call_function" and not is_qdq(node):
                mark_fallback(node, Fallback.FLOAT)
    with warnings.catch_warnings(), fewer_interpretations():
        warnings.simplefilter("ignore")
        edge = to_edge_transform_and_lower(
            ep,
            partitioner=[make_partitioner(edge_operators(), FUSING)],
            compile_config=EdgeCompileConfig(_check_ir_validity=False),
        )
        call = ForwardCall(bytes(edge.to_executorch().buffer))
    return lambda: call.run(inputs)


def time_case(case: Case, *, rounds: int, seconds: float) -> dict[str, float]:
    """Microseconds of an operator in each form."""
    is_chained = (case.is_chained or case.op == "MatMul") and case.op not in _FUNCTIONS
    links = (1, _LINKS) if is_chained else (1,)
    kinds = [kind for kind in Kind if kind is not Kind.BETWEEN or case.op not in _FUNCTIONS]
    names = [(kind, count) for kind in kinds for count in links]
    calls = [program(case, kind, count, case.x) for kind, count in names]
    if len(links) == 1:
        made = _operator(case)(torch.zeros(case.x), *_zeros(case.weight))
        names += [(Kind.INTEGER, 0), (Kind.INTEGER, -1), (Kind.FLOAT, 0)]
        sizes = (case.x, tuple(made.shape), (1,))
        calls += [program(case, Kind.INTEGER, 0, shape) for shape in sizes]
    times = dict(zip(names, _medians(calls, rounds, seconds), strict=True))

    def own(kind: Kind) -> float:
        if len(links) == 2:
            return (times[kind, _LINKS] - times[kind, 1]) / (_LINKS - 1)
        overhead = times[Kind.FLOAT, 0]  # of a call, with a conversion of one element
        around = (times[Kind.INTEGER, 0] + times[Kind.INTEGER, -1]) / 2
        return times[kind, 1] - (around if kind is not Kind.FLOAT else overhead)

    return {kind.value: round(max(own(kind), 0.1), 2) for kind in kinds}


def _zeros(weight: tuple[int, ...]) -> list[Tensor]:
    return [torch.zeros(weight)] if weight else []


def _medians(calls: list[Callable[[], object]], rounds: int, seconds: float) -> list[float]:
    return [statistics.median(us) for us in times_in_turn(calls, rounds=rounds, seconds=seconds)]


def ratio(us: dict[str, float]) -> float:
    """Speed of the integer operator over float between two integer operators.

    Of functions over float alone, which is less.
    """
    return us.get(Kind.BETWEEN, us[Kind.FLOAT]) / us[Kind.INTEGER]


def main() -> None:
    """Measure, print, and write unless told not to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200, help="timed rounds of each shape")
    parser.add_argument("--seconds", type=float, default=1.0, help="of each shape at most")
    parser.add_argument("--only", default="", help="classes whose names hold this; others are kept")
    options = parser.parse_args()
    portable_lib._unsafe_reset_threadpool(1)
    rows: list[dict[str, Any]] = []
    found: dict[str, list[float]] = {}
    for case in (case for case in CASES if options.only in case.name):
        us = time_case(case, rounds=options.rounds, seconds=options.seconds)
        named = {"cpu": cpu_slug(), "case": f"{case.name}; {case.x}; {case.weight}"}
        rows.append({**named, "class": case.name, "x": case.x, "weight": case.weight, **us})
        if Kind.BETWEEN in us:
            found.setdefault(case.name, []).append(ratio(us))
        print(f"{case.name:58s} {case.x!s:20s} {ratio(us):6.2f}", us, flush=True)
    file = Path(pt2e_quant.backends.xnnpack.__path__[0], "measured", f"{cpu_slug()}.json")
    file.parent.mkdir(exist_ok=True)
    made = means(found)
    if options.only:
        made = json.loads(file.read_text()) | made
    file.write_text(json.dumps(dict(sorted(made.items())), indent=2) + "\n")
    write_results("xnnpack_operators", rows, ("cpu", "case"))


if __name__ == "__main__":
    main()
