"""Translation validation of an ONNX model: what the export and each rewrite make of every value.

ONNX Runtime runs the model before and after each rewrite, without its own optimisation, on the
calls that the passes over the graph were checked with. The values that kept their name, type and
shape are compared, and the results with those of the graph that was exported.
"""

import math
from ast import literal_eval
from collections.abc import Callable, Sequence
from functools import partial
from itertools import compress
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common
from torch.fx import Graph, Node

from pt2e_quant.backends.compare_results import compare
from pt2e_quant.backends.judge_results import CEILING_DB
from pt2e_quant.backends.onnx.metadata import taken_inputs
from pt2e_quant.backends.onnx.runtime import SessionCall, open_session
from pt2e_quant.backends.onnx.values import make_constant
from pt2e_quant.backends.rounding_noise import DRAWS
from pt2e_quant.backends.sample_run import copied_leaves
from pt2e_quant.backends.validate_passes import (
    MARGIN_DB,
    RESULT,
    PassValidation,
    Values,
    check_values,
)
from pt2e_quant.core.errors import ArtifactError, InvariantError
from pt2e_quant.core.read_capture import capture_of

SCOPES = "pkg.torch.onnx.name_scopes"
"""The exporter's key of a node's module paths, outermost first, then the node."""

_SHOWN = frozenset(
    ir.DataType[name] for name in ("FLOAT", "DOUBLE", "INT8", "UINT8", "INT32", "INT64", "BOOL")
)
"""Dtypes that numpy and torch both have."""

_NOISE = 2.0**-21
"""Noise of each float value, relative to its root mean square; see `backends/rounding_noise.py`."""

_EXACT = frozenset({"DequantizeLinear", "Reshape", "Transpose", "Cast", "Identity", "Constant"})
"""Operators that round nothing."""

_DRAWING = frozenset(
    {"RandomUniform", "RandomNormal", "RandomUniformLike", "RandomNormalLike", "Multinomial"}
)


class RewriteValidation:
    """Compares an ONNX model with itself after each rewrite.

    Args:
        passes: what looked at the graph until it was exported.
    """

    def __init__(self, passes: PassValidation) -> None:
        capture = capture_of(passes.gm)
        self.passes = passes
        self.nodes: dict[str, Node] = {}
        taken = taken_inputs(capture)
        self.calls = [
            (label, [*compress(leaves, taken), *passes.more]) for label, leaves in passes.calls
        ]
        self.values = [_results_of(values) for values in passes.values]
        self.model: ir.Model | None = None
        """The last one that ONNX Runtime took; None before the export."""
        self.data = b""
        self.changes: list[str] = []
        """The changes since `model`."""

    def start(self, graph: Graph, model: ir.Model) -> None:
        """Compare a translated graph's results with the model's.

        Raises:
            InvariantError: they are not the same.
        """
        self.nodes = {node.name: node for node in graph.nodes}
        self.after("torch.onnx.export", model)

    def after(self, name: str, model: ir.Model) -> None:
        """Run the model that a change leaves, and compare.

        A model with marks in it cannot be run: the next that can is compared with the last.

        Raises:
            InvariantError: naming the change and the first value that it changed.
        """
        copied = _finished(model)
        data = _bytes_of(copied)
        if data == self.data:
            return
        self.data = data
        self.changes.append(name)
        try:
            runs = _runner(copied)
        except ArtifactError:
            return
        change = f"{'the step' if len(self.changes) == 1 else 'one of the steps'} to ONNX "
        change += ", ".join(self.changes)
        drawn = _drawn(copied)
        nodes = {key: self.nodes[of] for key, of in _origins(copied).items() if of in self.nodes}
        for at, (label, leaves) in enumerate(self.calls):
            before = self.values[at]
            if before is None:
                continue
            found = runs(leaves)
            if found is None:
                raise InvariantError(f"{change} leaves a model that cannot be called with {label}")
            found = {key: value for key, value in found.items() if key not in drawn}
            check_values(change, label, before, found, partial(self._bound_db, at), nodes)
            self.values[at] = found
        self.model, self.changes = copied, []

    def _bound_db(self, at: int, key: str, ratio: float) -> float:
        """The required SQNR of a value; lower where rounding noise moves the model itself."""
        plain, least = self.values[at], CEILING_DB
        if self.model is None or plain is None:
            return self.passes.bound_db(at, key, ratio)
        for draw in range(DRAWS):
            noisy = _runner(_with_noise(self.model, draw))(self.calls[at][1])
            if noisy is not None and key in noisy:
                own = compare(plain[key].double(), noisy[key].double()).ratio_db
                least = min(least, (-math.inf if math.isnan(own) else own) - MARGIN_DB)
            if least <= ratio:
                break
        return least


def _results_of(values: Values | None) -> Values | None:
    """A graph's results: its other values have other names in ONNX."""
    if values is None:
        return None
    return {key: value for key, value in values.items() if key.startswith(RESULT)}


def _finished(model: ir.Model) -> ir.Model:
    """A copy in which operators stand in order."""
    copied = model.clone()
    common.TopologicalSortPass()(copied)
    return copied


def _bytes_of(model: ir.Model) -> bytes:
    data: bytes = ir.to_proto(model).SerializeToString()
    return data


def _origins(model: ir.Model) -> dict[str, str]:
    """The node of the exported graph that each value was written for."""
    scopes = [(node, literal_eval(node.metadata_props.get(SCOPES, "[]"))) for node in model.graph]
    return {v.name: found[-1] for n, found in scopes if found for v in n.outputs if v.name}


def _drawn(model: ir.Model) -> set[str]:
    """The values and results that depend on random numbers."""
    found: set[ir.Value] = set()
    for node in model.graph:
        if node.op_type in _DRAWING or any(value in found for value in node.inputs):
            found.update(node.outputs)
    results = {f"{RESULT}{i}" for i, value in enumerate(model.graph.outputs) if value in found}
    return {value.name for value in found if value.name} | results


def _runner(model: ir.Model) -> Callable[[Sequence[Any]], Values | None]:
    """All values of a model for a call, by name; None where ONNX Runtime fails.

    Raises:
        ArtifactError: ONNX Runtime does not load the model.
    """
    shown = model.clone()
    results = len(shown.graph.outputs)
    known = {value.name for value in shown.graph.outputs}
    values = [v for n in shown.graph for v in n.outputs if v.name and v.dtype in _SHOWN]
    shown.graph.outputs.extend(v for v in values if v.name not in known)
    names = [value.name for value in shown.graph.outputs]
    call = SessionCall(open_session(_bytes_of(shown), threads=1, is_optimized=False))

    def run(leaves: Sequence[Any]) -> Values | None:
        try:
            found = call.run(copied_leaves(leaves))
        except Exception:  # Whatever ONNX Runtime raises at an extreme input: nothing to compare.
            return None
        by_name = {name: value for name, value in zip(names, found, strict=True) if name}
        in_order = {v.name: by_name[v.name] for v in values if v.name}
        return in_order | {f"{RESULT}{i}": found[i] for i in range(results)}

    return run


def _with_noise(model: ir.Model, draw: int) -> ir.Model:
    """A model in which each float value is moved as rounding moves it."""
    noisy = model.clone()
    graph = noisy.graph
    noise = make_constant(graph, "noise", np.array(_NOISE, np.float32))
    for index, node in enumerate(list(graph)):
        for value in node.outputs:
            if value.dtype == ir.DataType.FLOAT and node.op_type not in _EXACT:
                _move(value, noise, seed=float(1 + draw * 65_536 + index))
    return noisy


def _move(value: ir.Value, noise: ir.Value, seed: float) -> None:
    """Let what reads a value read it with noise, relative to its root mean square."""
    node, uses = value.producer(), list(value.uses())
    assert node is not None
    assert isinstance(node.graph, ir.Graph)
    drawn = ir.node("RandomNormalLike", [value], {"seed": seed})
    square = ir.node("Mul", [value, value])
    mean = ir.node("ReduceMean", [square.outputs[0]], {"keepdims": 0})
    root = ir.node("Sqrt", [mean.outputs[0]])
    size = ir.node("Mul", [root.outputs[0], noise])
    scaled = ir.node("Mul", [drawn.outputs[0], size.outputs[0]])
    moved = ir.node("Add", [value, scaled.outputs[0]])
    node.graph.insert_after(node, [drawn, square, mean, root, size, scaled, moved])
    for use in uses:
        use.node.replace_input_with(use.idx, moved.outputs[0])
