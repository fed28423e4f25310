"""ONNX Runtime: sessions, and what its own optimisation made of a model."""

import ctypes
import math
import os
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import torch
from onnxruntime.capi import onnxruntime_pybind11_state as stops
from torch import Tensor

from pt2e_quant.backends.onnx.exact_sums import runs_exactly
from pt2e_quant.core.errors import ArtifactError


class OperatorKind(StrEnum):
    """The kind of numbers that an operator computes with."""

    INTEGER = "integer"
    FLOAT = "float"
    CONVERT = "convert"
    INDEX = "index"


@dataclass(frozen=True, slots=True)
class Operator:
    """One operator of the optimized model.

    Args:
        op_type: for example "QLinearConv".
        kind: integer, float, a quantize/dequantize, or arithmetic on shapes and indices.
        output: the name of its first output.
        name: of the node, "" if it has none.
        at_border: a quantize of a graph input or a dequantize to a graph output.
        readers: the operators that read its result.
        is_constant: it dequantizes a constant, in every call.
        is_wide: it dequantizes integers of 16 bits, or a constant that is multiplied with them.
        reads_wide: it computes with what was dequantized from 16 bits.
        gives_real: it computes in float: from activations that were dequantized, booleans and
            places too; or its result is float, of the integers of a product.
    """

    op_type: str
    kind: OperatorKind
    output: str
    name: str = ""
    at_border: bool = False
    readers: tuple[str, ...] = ()
    is_constant: bool = False
    is_wide: bool = False
    reads_wide: bool = False
    gives_real: bool = False


@dataclass(frozen=True, slots=True)
class OptimizedModel:
    """The operators that ONNX Runtime runs, after its own optimisation."""

    operators: tuple[Operator, ...]

    def count(self, kind: OperatorKind | None = None) -> Counter[str]:
        """Operators by type, of one kind or of all."""
        return Counter(o.op_type for o in self.operators if kind in (None, o.kind))

    def unfused(self) -> list[Operator]:
        """Dequantizes inside the model: what reads them computes in float."""
        found = [o for o in self.operators if o.op_type == "DequantizeLinear"]
        return [o for o in found if not o.at_border]

    def real_values(self, *, products: bool) -> frozenset[str]:
        """The values that are computed in float, by the names of the nodes that make them.

        Args:
            products: those of integers that give float, too.
        """
        kinds = (OperatorKind.FLOAT, OperatorKind.INTEGER) if products else (OperatorKind.FLOAT,)
        found = (o.output for o in self.operators if o.gives_real and o.kind in kinds)
        return frozenset(name.removeprefix("node_") for name in found)


_FLOAT_RESULT = {
    "DequantizeLinear",
    "DynamicQuantizeLSTM",
    "DynamicQuantizeMatMul",
    "GatherBlockQuantized",
    "MatMulIntegerToFloat",
    "MatMulNBits",
}
_BFLOAT16 = "tensor(bfloat16)"
_OWN_INTEGER = (
    "DynamicQuantizeLSTM",
    "DynamicQuantizeMatMul",
    "GatherBlockQuantized",
    "MatMulNBits",
)
_EIGHT_BIT = (onnx.TensorProto.INT8, onnx.TensorProto.UINT8)
_SIXTEEN_BIT = (onnx.TensorProto.INT16, onnx.TensorProto.UINT16)
_INDEX_TYPES = (onnx.TensorProto.INT64, onnx.TensorProto.INT32, onnx.TensorProto.BOOL)
_SHAPES = ("Shape", "Size")
_INT64_RESULT = {"Shape", "Size", "NonZero", "ArgMax", "ArgMin"}
_BOOL_RESULT = {"Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "And", "Or", "Not"}


def open_session(
    model: bytes | Path,
    *,
    threads: int = 0,
    optimized_path: Path | None = None,
    is_optimized: bool = True,
    profile_prefix: Path | None = None,
) -> onnxruntime.InferenceSession:
    """A session on the CPU provider; `threads` 0 leaves the choice to ONNX Runtime.

    Sums of products of a model's bytes are exact in it on any CPU; see `exact_sums`.

    Without `is_optimized` it runs the operators of the model one by one as they stand. With
    `profile_prefix` it writes the time of every operator to a file of that prefix
    (`end_profiling`).

    Raises:
        ArtifactError: ONNX Runtime does not load the model.
    """
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # its warnings are about its own fallbacks; we report those
    options.intra_op_num_threads = threads
    if not is_optimized:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    if optimized_path is not None:
        options.optimized_model_filepath = str(optimized_path)
    if profile_prefix is not None:
        options.enable_profiling = True
        options.profile_file_prefix = str(profile_prefix)
    source = runs_exactly(model) if isinstance(model, bytes) else str(model)
    try:
        return onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # its exceptions share no base class of their own
        raise ArtifactError(f"ONNX Runtime does not load this model: {error}") from error


def optimize(model: bytes) -> tuple[OptimizedModel, onnxruntime.InferenceSession]:
    """The operators that ONNX Runtime runs for a model, and the session that runs them."""
    with tempfile.TemporaryDirectory(prefix="pt2e_quant_") as folder:
        path = Path(folder) / "optimized.onnx"
        session = open_session(model, optimized_path=path)
        operators = read_operators(onnx.load(os.fspath(path)).graph)
    return OptimizedModel(tuple(operators)), session


def read_operators(
    graph: onnx.GraphProto, outer: Mapping[str, int] | None = None
) -> list[Operator]:
    """Classify every operator of a graph by the numbers it computes with.

    Args:
        graph: the model's, or a branch of its control flow, whose operators are listed too.
        outer: element types of the values around a branch.
    """
    types = dict(outer or {}) | {i.name: i.data_type for i in graph.initializer}
    types |= {i.name: i.type.tensor_type.elem_type for i in graph.input}
    inputs = {i.name for i in graph.input}
    outputs = {o.name for o in graph.output}
    constants = {i.name for i in graph.initializer}
    readers: dict[str, list[str]] = {}
    for node in graph.node:
        for name in node.input:
            readers.setdefault(name, []).append(node.op_type)
    wide = _wide_dequantized(graph, types)
    operators: list[Operator] = []
    real: set[str] = set()
    judged: set[str] = set()
    for node in graph.node:
        result = _result_type(node, types)
        types.update(dict.fromkeys(node.output, result))
        for attribute in node.attribute:
            if attribute.HasField("g"):
                operators += read_operators(attribute.g, types)
        if node.op_type == "Constant":
            continue
        border = (node.op_type == "QuantizeLinear" and node.input[0] in inputs) or (
            node.op_type == "DequantizeLinear" and node.output[0] in outputs
        )
        kind = _kind(node, types)
        is_constant = node.op_type == "DequantizeLinear" and node.input[0] in constants
        is_real = kind is OperatorKind.FLOAT and not real.isdisjoint(node.input)
        is_real |= kind is OperatorKind.INTEGER and result == onnx.TensorProto.FLOAT
        if is_real or (node.op_type == "DequantizeLinear" and not is_constant):
            real.update(node.output)
        if kind is OperatorKind.INDEX and _judges(node, real, judged):
            kind, is_real = OperatorKind.FLOAT, True
            judged.update(node.output)
        operators.append(
            Operator(
                op_type=node.op_type,
                kind=kind,
                output=node.output[0],
                name=node.name,
                at_border=border,
                readers=tuple(readers.get(node.output[0], ())),
                is_constant=is_constant,
                is_wide=node.output[0] in wide,
                reads_wide=any(name in wide for name in node.input),
                gives_real=is_real,
            )
        )
    return operators


def _judges(node: onnx.NodeProto, real: set[str], judged: set[str]) -> bool:
    """True if an operator compares real values, or finds places among them.

    An unequal is an equal with a not behind it.
    """
    if node.op_type == "Not":
        return node.input[0] in judged
    return node.op_type not in _SHAPES and not real.isdisjoint(node.input)


def _wide_dequantized(graph: onnx.GraphProto, types: Mapping[str, int]) -> set[str]:
    """Results of dequantizes of 16 bits, and of constants that products read beside such."""
    dequantizes = [node for node in graph.node if node.op_type == "DequantizeLinear"]
    # The zero point's type is known from the start.
    wide = {
        node.output[0]
        for node in dequantizes
        if len(node.input) > 2 and types.get(node.input[2]) in _SIXTEEN_BIT
    }
    beside = {n for node in graph.node if node.input and node.input[0] in wide for n in node.input}
    return wide | (beside & {node.output[0] for node in dequantizes})


def _result_type(node: onnx.NodeProto, types: Mapping[str, int]) -> int:
    if node.op_type == "Constant":
        return node.attribute[0].t.data_type or onnx.TensorProto.INT64
    if node.op_type == "Cast":
        return next(int(a.i) for a in node.attribute if a.name == "to")
    if node.op_type in _FLOAT_RESULT:
        return onnx.TensorProto.FLOAT
    if node.op_type in _INT64_RESULT:
        return onnx.TensorProto.INT64
    if node.op_type in _BOOL_RESULT:
        return onnx.TensorProto.BOOL
    if node.op_type == "QGemm":
        has_zero_point = len(node.input) > 8 and node.input[8] != ""
        return types.get(node.input[8], 0) if has_zero_point else onnx.TensorProto.FLOAT
    if node.op_type in ("QuantizeLinear", "DynamicQuantizeLinear"):
        zero_point = types.get(node.input[2], 0) if len(node.input) > 2 else 0
        return zero_point or onnx.TensorProto.UINT8
    data = 1 if node.op_type in ("Where", "QLinearWhere") else 0
    if node.op_type == "QLinearConcat":
        data = 2
    if len(node.input) <= data:
        return onnx.TensorProto.FLOAT
    return types.get(node.input[data], onnx.TensorProto.FLOAT)


def _kind(node: onnx.NodeProto, types: Mapping[str, int]) -> OperatorKind:
    if node.op_type in ("QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear"):
        return OperatorKind.CONVERT
    if node.op_type.startswith(("QLinear", "QGemm", "MatMulInteger", "ConvInteger")):
        return OperatorKind.INTEGER
    if node.op_type in _OWN_INTEGER:
        return OperatorKind.INTEGER
    result = types.get(node.output[0], onnx.TensorProto.FLOAT)
    if result in (*_EIGHT_BIT, *_SIXTEEN_BIT):
        return OperatorKind.INTEGER
    return OperatorKind.INDEX if result in _INDEX_TYPES else OperatorKind.FLOAT


_STOPS = (
    stops.EPFail,
    stops.Fail,
    stops.InvalidArgument,
    stops.NotImplemented,
    stops.RuntimeException,
)
"""The errors that a call of ONNX Runtime raises."""


def _stopped(error: Exception) -> ArtifactError:
    return ArtifactError(
        f"ONNX Runtime stopped: {error}",
        fix="see the operator that it names, whose name is that of the graph's node, and give "
        "sizes or values that it takes; torch.export.Dim(name, min=…, max=…) leaves sizes out",
    )


class SessionCall:
    """Runs a session on the inputs in order, with all that does not change from call to call ready.

    Tensors are taken and given on the CPU; results are the caller's own memory.

    Args:
        session: of ONNX Runtime.
    """

    def __init__(self, session: onnxruntime.InferenceSession) -> None:
        self.session = session
        borders = session.get_inputs(), session.get_outputs()
        self.inputs, self.outputs = ([declared.name for declared in side] for side in borders)
        # numpy has no bfloat16
        self._has_bfloat16 = any(d.type == _BFLOAT16 for side in borders for d in side)

    def run(self, leaves: Sequence[Tensor | int | float | bool]) -> list[Tensor]:
        """The results of a call.

        Raises:
            ArtifactError: the runtime stopped.
        """
        if self._has_bfloat16:
            return self.run_with_state(leaves, ())[0]
        feeds = dict(zip(self.inputs, map(_to_numpy, leaves), strict=True))
        try:
            found = self.session.run(self.outputs, feeds)
        except _STOPS as error:
            raise _stopped(error) from error
        # A rank of zero comes as numpy's scalar.
        return [torch.from_numpy(np.asarray(array)) for array in found]

    def run_with_state(
        self,
        leaves: Sequence[Tensor | int | float | bool],
        state: Sequence[onnxruntime.OrtValue],
    ) -> tuple[list[Tensor], list[onnxruntime.OrtValue]]:
        """Run a model whose last inputs and outputs are state: the results, and the next state.

        The state stays ONNX Runtime's own memory from call to call.
        """
        values = [*(to_ort(leaf) for leaf in leaves), *state]
        feeds = dict(zip(self.inputs, values, strict=True))
        try:
            found = self.session.run_with_ort_values(self.outputs, feeds)
        except _STOPS as error:
            raise _stopped(error) from error
        results = found[: len(found) - len(state)]
        return [_to_torch(v) for v in results], found[len(results) :]


def _to_torch(value: onnxruntime.OrtValue) -> Tensor:
    """A copy of a value of ONNX Runtime on the CPU."""
    if value.data_type() != _BFLOAT16:
        return torch.from_numpy(np.asarray(value.numpy()))
    shape = value.shape()
    if 0 in shape:
        return torch.empty(shape, dtype=torch.bfloat16)
    memory = (ctypes.c_uint16 * math.prod(shape)).from_address(value.data_ptr())
    return torch.frombuffer(memory, dtype=torch.bfloat16).reshape(shape).clone()


def to_ort(leaf: Tensor | int | float | bool) -> onnxruntime.OrtValue:
    """A value of ONNX Runtime on the CPU."""
    if isinstance(leaf, Tensor) and leaf.dtype is torch.bfloat16:
        return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(
            _to_numpy(leaf.view(torch.int16)), onnx.TensorProto.BFLOAT16
        )
    return onnxruntime.OrtValue.ortvalue_from_numpy(_to_numpy(leaf))


def _to_numpy(leaf: Tensor | int | float | bool) -> np.ndarray:
    if isinstance(leaf, Tensor):
        array: np.ndarray = leaf.contiguous().numpy(force=True)  # detached, on the CPU
        return array
    return np.array(leaf, np.int64 if isinstance(leaf, int) else np.float32)
