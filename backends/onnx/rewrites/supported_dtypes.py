"""Operators whose dtype ONNX Runtime has no CPU kernel for, computed in a dtype that it has."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import product

import onnx
import onnx_ir as ir
from onnxruntime.capi import onnxruntime_pybind11_state as runtime

from pt2e_quant.backends.onnx.values import call, redirect

_D = ir.DataType
_WIDER: Mapping[ir.DataType, tuple[ir.DataType, ...]] = {
    _D.DOUBLE: (_D.FLOAT,),
    **dict.fromkeys((_D.INT8, _D.UINT8, _D.INT16, _D.UINT16, _D.BOOL), (_D.INT32, _D.FLOAT)),
}
"""Dtypes that can replace a dtype, best first."""


def use_supported_dtypes(graph: ir.Graph) -> int:
    """Cast what an operator without a kernel reads to a dtype with one, and its results back.

    Doubles lose bits so. Casts of integers wrap around as the operators would.

    Before:  Erf(x)                     x: double
    After:   Cast(Erf(Cast(x)))         to float, to double
    """
    opset = graph.opset_imports.get("", onnx.defs.onnx_opset_version())
    nodes = [node for node in graph if node.domain == "" and _reads_other(node)]
    return sum(_compute_wider(node, opset) for node in nodes)


def _reads_other(node: ir.Node) -> bool:
    return any(value is not None and value.dtype in _WIDER for value in node.inputs)


def _compute_wider(node: ir.Node, opset: int) -> bool:
    """True if a node was lacking a kernel, and has one now."""
    if node.op_type in ("Cast", "If", "Loop", "Scan") or not onnx.defs.has(node.op_type, opset):
        return False
    schema = onnx.defs.get_schema(node.op_type, opset)
    inputs = list(_constrained(schema.inputs, node.inputs))
    outputs = list(_constrained(schema.outputs, node.outputs))
    dtypes = {name: value.dtype for name, value in (*inputs, *outputs) if value.dtype is not None}
    wider = _with_kernel(node.op_type, schema.since_version, dtypes)
    if not wider:
        return False
    for at, value in enumerate(node.inputs):
        name = next((n for n, v in inputs if v is value), None)
        if value is not None and name in wider:
            cast = call(node, "Cast", [value], {"to": wider[name]}, name=f"{value.name}_wider")
            cast.type, cast.shape = ir.TensorType(wider[name]), value.shape
            node.replace_input_with(at, cast)
    for name, value in outputs:
        if name in wider:
            _cast_back(node, value, dtypes[name], wider[name])
    return True


def _cast_back(node: ir.Node, value: ir.Value, dtype: ir.DataType, wider: ir.DataType) -> None:
    """Give the readers of a result its dtype."""
    cast = call(
        node, "Cast", [value], {"to": dtype}, name=f"{value.name}_back", like=value, after=True
    )
    value.type = ir.TensorType(wider)
    redirect(value, cast)
    producer = cast.producer()
    assert producer is not None
    producer.replace_input_with(0, value)


def _constrained(
    formals: Sequence[onnx.defs.OpSchema.FormalParameter], values: Sequence[ir.Value | None]
) -> Iterator[tuple[str, ir.Value]]:
    """The type constraint of each tensor that is there; the last stands for all behind it."""
    for at, value in enumerate(values):
        # A sequence's dtype is that of its tensors.
        if value is not None and isinstance(value.type, ir.TensorType) and formals:
            yield formals[min(at, len(formals) - 1)].type_str, value


def _with_kernel(
    op_type: str, version: int, dtypes: Mapping[str, ir.DataType]
) -> dict[str, ir.DataType]:
    """The dtypes to compute in instead; empty if there is a kernel, or none for these either."""
    kernels = [types for low, high, types in _kernels()[op_type] if low <= version <= high]
    if any(_takes(types, dtypes) for types in kernels):
        return {}
    if not kernels:  # It is a function of others, which have kernels for float.
        return {n: _D.FLOAT for n, d in dtypes.items() if d is _D.DOUBLE}
    for other in dict.fromkeys(dtype for dtype in dtypes.values() if dtype in _WIDER):
        for wider, types in product(_WIDER[other], kernels):
            changed = {n: wider for n, d in dtypes.items() if d is other and n in types}
            if _takes(types, {**dtypes, **changed}):
                return changed
    return {}


def _takes(types: Mapping[str, list[str]], dtypes: Mapping[str, ir.DataType]) -> bool:
    """True if a kernel is for these dtypes; a constraint that it does not name takes any."""
    return all(
        name not in types or f"tensor({dtype.name.lower()})" in types[name]
        for name, dtype in dtypes.items()
    )


@cache
def _kernels() -> Mapping[str, list[tuple[int, int, Mapping[str, list[str]]]]]:
    """Operator to first and last version and dtypes by constraint, of each CPU kernel."""
    found = defaultdict(list)
    for kernel in runtime.get_all_opkernel_def():
        if kernel.provider == "CPUExecutionProvider" and kernel.domain == "":
            found[kernel.op_name].append((*kernel.version_range, dict(kernel.type_constraints)))
    return found
