"""How far runtimes are from exact integers, in steps: single operators, and a small CNN.

`python -m benchmarks.parity` writes `benchmarks/results/parity.json`; `docs/generate.py` makes
docs/parity.md of it. Each operator is one graph of DRAWS branches, whose weights, scales and zero
points are drawn. A case is one value of a result.
"""

import math
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.nn import functional

import pt2e_quant as pq
from benchmarks.drawn_operators import Call, Part
from benchmarks.results import write_results
from pt2e_quant.core.qdq import QdqKind, kind_of_qdq, read_qparams

DRAWS = 20
RUNTIMES = {"xnnpack": "xnnpack", "onnx": "onnxruntime_x86", "cpu": "onednn", "cuda": "triton"}
"""Backends, and the profile that the integer reference has for each.

The Triton kernels of the last one run by their definitions where there is no GPU.
"""
OPTIONS: dict[str, dict[str, Any]] = {"cuda": {"allow_unmeasured": True}}
"""What a backend's `lower` is given beside the graph."""
_FLOAT_SUM = "computed in float, whose sum is rounded at each step"
REASONS = {
    (
        "relu",
        "onnx",
    ): "the relu is dropped, and two pairs of q/dq that follow each other are merged "
    "into one: the input is rounded once, to the output's scale",
    ("mean", "cpu"): _FLOAT_SUM,
    ("matmul", "cpu"): _FLOAT_SUM,
    ("conv_transpose2d", "onnx"): _FLOAT_SUM,
    (
        "maximum",
        "xnnpack",
    ): "a value 8e-6 of a step above a tie, which the quotient of the scales in float32 is on",
    **{
        (name, runtime): "the runtime computes it in float, with exponentials or sums of its own"
        for name, runtime in (
            *(("softmax", "xnnpack"), ("softmax", "cpu"), ("softmax", "cuda")),
            *(("layer_norm", "xnnpack"), ("rms_norm", "xnnpack")),
        )
    },
}
"""Why a runtime is not equal to the reference; any other row must be."""


class Branches(nn.Module):
    """Modules beside each other, each with inputs and a result of its own."""

    def __init__(self, parts: Sequence[Part]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(module for module, _ in parts)
        self.taken = [len(shapes) for _, shapes in parts]

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """The results in order."""
        given = iter(inputs)
        return tuple(
            part(*islice(given, count)) for part, count in zip(self.parts, self.taken, strict=True)
        )


class Joined(nn.Module):
    """Two tensors behind each other."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Both along the last axis."""
        return torch.cat((x, y), -1)


class Residual(nn.Module):
    """A convolution, a depthwise one, a residual add, a pool and a linear."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, 2, 1)
        self.depthwise = nn.Conv2d(16, 16, 3, padding=1, groups=16)
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Scores."""
        x = torch.relu(self.stem(x))
        x = x + functional.relu6(self.depthwise(x))
        scores: Tensor = self.head(functional.adaptive_avg_pool2d(x, 1).flatten(1))
        return scores


@dataclass(frozen=True, slots=True)
class Case:
    """An operator: a module with weights of its own, and the shapes of its inputs.

    The results of DRAWS of them hold at least 10,000 values.
    """

    make: Callable[[], nn.Module]
    shapes: Sequence[tuple[int, ...]]


_IMAGE, _ROWS = (1, 8, 8, 8), (8, 64)
OPERATORS = {
    "conv2d": Case(partial(nn.Conv2d, 8, 8, 3, padding=1), [_IMAGE]),
    "depthwise conv2d": Case(partial(nn.Conv2d, 8, 8, 3, padding=1, groups=8), [_IMAGE]),
    "conv2d, relu": Case(lambda: nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()), [_IMAGE]),
    "linear": Case(partial(nn.Linear, 64, 64), [_ROWS]),
    "add": Case(partial(Call, torch.add), [_ROWS, _ROWS]),
    "sub": Case(partial(Call, torch.sub), [_ROWS, _ROWS]),
    "mul": Case(partial(Call, torch.mul), [_ROWS, _ROWS]),
    "max_pool2d": Case(partial(nn.MaxPool2d, 2), [(1, 8, 16, 16)]),
    "avg_pool2d": Case(partial(nn.AvgPool2d, 2), [(1, 8, 16, 16)]),
    "mean": Case(partial(nn.AdaptiveAvgPool2d, 1), [(16, 32, 5, 5)]),
    "relu": Case(nn.ReLU, [_ROWS]),
    "leaky_relu": Case(partial(nn.LeakyReLU, 0.1), [_ROWS]),
    "sigmoid": Case(nn.Sigmoid, [_ROWS]),
    "tanh": Case(nn.Tanh, [_ROWS]),
    "hardswish": Case(nn.Hardswish, [_ROWS]),
    "gelu": Case(nn.GELU, [_ROWS]),
    "elu": Case(nn.ELU, [_ROWS]),
    "silu": Case(nn.SiLU, [_ROWS]),
    "conv1d": Case(partial(nn.Conv1d, 8, 8, 3, padding=1), [(1, 8, 64)]),
    "conv_transpose2d": Case(partial(nn.ConvTranspose2d, 8, 8, 3, padding=1), [_IMAGE]),
    "matmul": Case(partial(Call, torch.matmul), [(4, 16, 24), (4, 24, 16)]),
    "cat": Case(Joined, [(8, 32), (8, 32)]),
    "maximum": Case(partial(Call, torch.maximum), [_ROWS, _ROWS]),
    "softmax": Case(partial(nn.Softmax, -1), [_ROWS]),
    "layer_norm": Case(partial(nn.LayerNorm, 64), [_ROWS]),
    "rms_norm": Case(partial(nn.RMSNorm, 64, eps=1e-6), [_ROWS]),
    "nearest resize": Case(partial(nn.Upsample, scale_factor=2), [(1, 8, 4, 8)]),
    "pad": Case(partial(nn.ZeroPad2d, 1), [(1, 8, 6, 10)]),
    "transpose": Case(partial(nn.Unflatten, 1, (8, 8)), [_ROWS]),
    "a CNN": Case(Residual, [(50, 3, 16, 16)]),
}


def drawn(shape: Sequence[int]) -> Tensor:
    """Normal values with a spread and a mean of their own."""
    spread, middle = math.exp(torch.empty(()).uniform_(-2, 2)), torch.empty(()).uniform_(-1, 1)
    return spread * (torch.randn(tuple(shape)) + middle)


def quantized_branches(parts: Sequence[Part]) -> tuple[GraphModule, list[Tensor]]:
    """A canonical graph for all runtimes, and inputs of it."""
    model = Branches(parts).eval()
    inputs = [drawn(shape) for _, shapes in parts for shape in shapes]
    program = torch.export.export(model, tuple(inputs))
    prepared = pq.prepare_pt2e(program, pq.IntegerQuantizer(), int_only=True)
    quantized = pq.convert_pt2e(pq.calibrate(prepared, [tuple(inputs)], progress=False))
    return quantized, inputs


def coarsen_scales(gm: GraphModule) -> None:
    """Round the scales of a graph to 5 bits, in place: sums then lie on ties, often."""
    for node in gm.graph.nodes:
        args: Any = node.args
        if kind_of_qdq(node) is QdqKind.PER_TENSOR:
            node.args = (args[0], float(_rounded(torch.tensor(args[1]))), *args[2:])
        elif kind_of_qdq(node) is QdqKind.PER_CHANNEL:
            scales = gm.get_buffer(args[1].target)
            scales.copy_(_rounded(scales))
    gm.recompile()


def _rounded(scales: Tensor) -> Tensor:
    mantissa, exponent = torch.frexp(scales)
    return torch.ldexp((32 * mantissa).round() / 32, exponent)


def steps_apart(
    found: Sequence[Tensor], expected: Sequence[Tensor], gm: GraphModule
) -> list[Tensor]:
    """How many integers each result is apart, value by value."""
    (results,) = gm.graph.output_node().args
    differences = []
    for value, left, right in zip(results, found, expected, strict=True):
        scale = read_qparams(gm, value).scale_float
        differences.append(((left.double() - right.double()) / scale).round().abs().flatten())
    return differences


def differences(each: Sequence[Tensor]) -> dict[str, int]:
    """How many values are not equal, and the largest difference."""
    steps = torch.cat([*each])
    return {"cases": steps.numel(), "differ": int((steps > 0).sum()), "steps": int(steps.max())}


def measure(name: str, backends: Sequence[str], draws: int = DRAWS) -> list[dict[str, Any]]:
    """Compare runtimes, and the q/dq graph, with the integer reference in the runtime's profile.

    Args:
        name: of an operator of OPERATORS.
        backends: keys of RUNTIMES.
        draws: of its weights, scales and zero points; a CNN has one.

    Returns:
        A row for each backend, with "float", what it computes in float; and one for the q/dq graph
        against the default profile.
    """
    torch.manual_seed(0)
    case = OPERATORS[name]
    count = 1 if name == "a CNN" else draws
    gm, inputs = quantized_branches([(case.make(), case.shapes) for _ in range(count)])
    rows: list[dict[str, Any]] = []
    with torch.no_grad():
        for backend in backends:
            expected = pq.integer_reference(gm, RUNTIMES[backend])(*inputs)
            lower = pq.backends.get(backend).lower
            artifact = lower(gm, verify=False, strict=False, **OPTIONS.get(backend, {}))
            found = differences(steps_apart(artifact.run(*inputs), expected, gm))
            floats = pq.audit(artifact).islands
            names = sorted({re.sub(r"^\d+ ", "", each.operator) for each in floats})
            rows.append({"operator": name, "runtime": backend, **found, "float": names})
        expected = pq.integer_reference(gm)(*inputs)
        found = differences(steps_apart(gm(*inputs), expected, gm))
        rows.append({"operator": name, "runtime": "qdq", **found, "float": []})
    return rows


def measure_drawn(
    parts: Sequence[Part], backend: str, *, has_ties: bool
) -> list[tuple[Part, dict[str, int]]]:
    """Compare a runtime with the integer reference on operators of `benchmarks.drawn_operators`.

    Args:
        parts: the operators.
        backend: a key of RUNTIMES.
        has_ties: whether scales are coarse.

    Returns:
        Each operator with its differences.
    """
    gm, inputs = quantized_branches(parts)
    if has_ties:
        coarsen_scales(gm)
    with torch.no_grad():
        expected = pq.integer_reference(gm, RUNTIMES[backend])(*inputs)
        artifact = pq.backends.get(backend).lower(gm, verify=False, strict=False, allow_slower=True)
        steps = steps_apart(artifact.run(*inputs), expected, gm)
    return [(part, differences([each])) for part, each in zip(parts, steps, strict=True)]


def unexplained(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of runtimes that differ without a reason."""
    return [
        row
        for row in rows
        if row["runtime"] in RUNTIMES
        and row["differ"]
        and (row["operator"], row["runtime"]) not in REASONS
    ]


def main(names: Sequence[str]) -> int:
    """Measure the operators of these names, or all, and write the file; 1 if one is unexplained."""
    rows = []
    for name in names or OPERATORS:
        rows += measure(name, tuple(RUNTIMES))
        print(*rows[-1 - len(RUNTIMES) :], sep="\n", flush=True)
    write_results("parity", rows, ("operator", "runtime"))
    return 1 if unexplained(rows) else 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main(sys.argv[1:]))
