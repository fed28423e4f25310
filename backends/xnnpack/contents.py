"""Read what a `.pte` runs: each delegate's operators with their dtypes, and the rest.

The XNNPACK delegate's payload is a flatbuffer of ExecuTorch's own schema. Reading it, and not the
graph that went in, is how a test proves that an operator runs in integers.
"""

import importlib.resources
import itertools
import json
import re
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from executorch.backends.xnnpack import serialization
from executorch.backends.xnnpack.serialization.xnnpack_graph_serialize import XNNHeader
from executorch.exir._serialize._flatbuffer import _flatc_decompile
from executorch.exir._serialize._program import deserialize_pte_binary
from executorch.exir.schema import (
    DelegateCall,
    ExecutionPlan,
    KernelCall,
    Operator,
    Program,
    Tensor,
)
from torch import TensorType

FLOAT = "fp32"
"""The dtype name of a float tensor in the payload; integers are qint8, qcint8, qint32, …"""

DATA_MOVEMENT = frozenset({"Convert", "StaticTranspose", "StaticReshape", "Copy"})
"""Operators that change a tensor's type or layout and compute nothing."""

_PRODUCTS = frozenset(
    {"BatchMatrixMultiply", "Conv2d", "ConvTranspose2d", "DepthwiseConv2d", "FullyConnected"}
)

NO_HANDLE = 2**16 - 1
"""The debug handle of an operator that no node was lowered to."""

_NO_TENSOR = 2**32 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class DelegateOp:
    """One operator inside a delegate.

    Args:
        name: XNNPACK's name without its prefix, for example "Conv2d".
        inputs: dtypes of the tensors it reads, absent ones left out.
        output: dtype of its result.
        clamp: the (min, max) fused into it.
        handle: ExecuTorch's debug handle, the same for all that one node was lowered to.
    """

    name: str
    inputs: tuple[str, ...]
    output: str
    clamp: tuple[float, float] | None = None
    handle: int = field(default=NO_HANDLE, compare=False)

    @property
    def is_integer(self) -> bool:
        """True if every tensor it touches is an integer tensor."""
        return FLOAT not in (*self.inputs, self.output)

    @property
    def multiplies_integers(self) -> bool:
        """True if it is an integer operator, or a product of two integer tensors."""
        return self.is_integer or (len(self.inputs) > 1 and FLOAT not in self.inputs[:2])

    @property
    def is_product(self) -> bool:
        """True if it sums products."""
        return self.name in _PRODUCTS

    def __str__(self) -> str:
        fused = f" clamp{list(self.clamp)}" if self.clamp else ""
        return f"{self.name}({', '.join(self.inputs)}) -> {self.output}{fused}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramContents:
    """One method of a program.

    Args:
        delegates: the operators of each XNNPACK delegate, in order of call.
        kernels: ExecuTorch operators outside of the delegates, with how often they are called.
        input_sizes: the largest sizes of each tensor that it takes, in order.
        overloads: of the kernels, as the runtime's registry names them ("aten::round.out").
        mistyped: those that a call gives something else for a tensor, at which the runtime ends
            the process.
        places: of the delegates: chain, and instruction of the chain.
    """

    delegates: tuple[tuple[DelegateOp, ...], ...]
    kernels: Counter[str]
    input_sizes: tuple[tuple[int, ...], ...] = ()
    overloads: frozenset[str] = frozenset()
    mistyped: frozenset[str] = frozenset()
    places: tuple[tuple[int, int], ...] = ()

    def ops(self) -> list[DelegateOp]:
        """All delegates' operators."""
        return [op for delegate in self.delegates for op in delegate]

    def integer_ops(self) -> Counter[str]:
        """Computing operators that run in integers, by name: products with a float result too."""
        found = (o for o in self.ops() if o.name not in DATA_MOVEMENT)
        return Counter(o.name for o in found if o.multiplies_integers)

    def float_ops(self) -> Counter[str]:
        """Computing operators that run in float, by name."""
        found = (o for o in self.ops() if o.name not in DATA_MOVEMENT)
        return Counter(o.name for o in found if not o.multiplies_integers)

    def undelegated_qdq(self) -> Counter[str]:
        """q/dq operators that ExecuTorch itself runs, one tensor pass each."""
        return Counter(
            {
                name: count
                for name, count in self.kernels.items()
                if re.search(r"(quantize|choose_qparams)", name)
                and "embedding" not in name
                and name.startswith("quantized_decomposed")
            }
        )

    def __str__(self) -> str:
        lines = [f"{name} x{count}" for name, count in sorted(self.kernels.items())]
        for i, delegate in enumerate(self.delegates):
            lines += [f"delegate {i}:", *(f"  {op}" for op in delegate)]
        return "\n".join(lines)


def read_contents(pte: bytes) -> ProgramContents:
    """Read the method "forward" of a serialized program.

    Raises:
        ValueError: the bytes are no program, or hold no such method.
    """
    program = deserialize_pte_binary(pte).program
    plan = _plan(program)
    kernels: Counter[str] = Counter()
    overloads: set[str] = set()
    mistyped: set[str] = set()
    called: dict[tuple[int, int], int] = {}
    for number, chain in enumerate(plan.chains):
        for place, instruction in enumerate(chain.instructions):
            call = instruction.instr_args
            if isinstance(call, KernelCall):
                op = plan.operators[call.op_index]
                kernels[op.name.replace("::", ".")] += 1
                overloads.add(name := f"{op.name}.{op.overload}".removesuffix("."))
                if not _fits(call, op, plan):
                    mistyped.add(name)
            elif isinstance(call, DelegateCall):
                called[number, place] = call.delegate_index
    data = [plan.delegates[i].processed.index for i in called.values()]
    payloads = [program.backend_delegate_data[i].data for i in data]
    inputs = [plan.values[i].val for i in plan.inputs]
    return ProgramContents(
        delegates=tuple(read_payload(bytes(p)) for p in payloads),
        kernels=kernels,
        input_sizes=tuple(tuple(v.sizes) for v in inputs if isinstance(v, Tensor)),
        overloads=frozenset(overloads),
        mistyped=frozenset(mistyped),
        places=tuple(called),
    )


def _fits(call: KernelCall, op: Operator, plan: ExecutionPlan) -> bool:
    """True if a call gives a tensor wherever its kernel takes one, if torch knows the kernel."""
    try:
        schema = torch._C._get_schema(op.name, op.overload)
    except RuntimeError:  # ExecuTorch's own, which looks at its arguments
        return True
    given = zip(schema.arguments, call.args, strict=False)
    tensors = [plan.values[at].val for taken, at in given if isinstance(taken.type, TensorType)]
    return all(isinstance(value, Tensor) for value in tensors)


def read_written_inputs(pte: bytes) -> tuple[int, ...]:
    """The positions of the inputs that "forward" writes, in the order that it returns them.

    ExecuTorch puts them before the results of the program.

    Raises:
        ValueError: the bytes are no program, or hold no such method.
    """
    plan = _plan(deserialize_pte_binary(pte).program)
    places = {value: index for index, value in enumerate(plan.inputs)}
    leading = itertools.takewhile(places.__contains__, plan.outputs)
    return tuple(places[value] for value in leading)


def _plan(program: Program) -> ExecutionPlan:
    found = next((p for p in program.execution_plan if p.name == "forward"), None)
    if found is None:
        raise ValueError('no method "forward" in this program')
    return found


def read_named_data(pte: bytes) -> dict[str, bytes]:
    """The program's named data: the delegates' weights and scales by their keys."""
    stored = deserialize_pte_binary(pte).named_data
    if stored is None:
        return {}
    return {key: bytes(stored.buffers[e.buffer_index]) for key, e in stored.pte_data.items()}


def read_payload(payload: bytes) -> tuple[DelegateOp, ...]:
    """The operators of one delegate, in order."""
    graph = _decode(payload)
    types = [_dtype_of(value["xvalue_union"]) for value in graph["xvalues"]]
    return tuple(_op(node, types) for node in graph["xnodes"])


def _decode(payload: bytes) -> dict[str, Any]:
    header = XNNHeader.from_bytes(payload[: XNNHeader.EXPECTED_LENGTH])
    start = header.flatbuffer_offset
    schema = importlib.resources.files(serialization).joinpath("schema.fbs").read_bytes()
    with tempfile.TemporaryDirectory() as folder:
        where = Path(folder)
        (where / "schema.fbs").write_bytes(schema)
        (where / "graph.bin").write_bytes(payload[start : start + header.flatbuffer_size])
        _flatc_decompile(folder, str(where / "schema.fbs"), str(where / "graph.bin"))
        text = (where / "graph.json").read_text(encoding="utf-8")
    # flatc writes infinities bare, which JSON does not know.
    text = re.sub(r": (-?)inf\b", r": \1Infinity", text)
    decoded: dict[str, Any] = json.loads(text)
    return decoded


def _dtype_of(value: dict[str, Any]) -> str:
    tensor = value.get("tensor_value", value)
    return str(tensor.get("datatype", "")).removeprefix("xnn_datatype_")


def _op(node: dict[str, Any], types: list[str]) -> DelegateOp:
    ids = {k: v for k, v in node["xnode_union"].items() if k.endswith("_id") and v != _NO_TENSOR}
    limits = node.get("output_min_max")
    # Concatenate lists unused inputs as id 0: only as many as its name says are real.
    name = re.sub(r"^_?XNN", "", node["xnode_union_type"])
    inputs = [types[v] for k, v in ids.items() if k != "output_id"]
    joined = re.fullmatch(r"Concatenate(\d)", name)
    if joined:
        inputs = inputs[: int(joined[1])]
    return DelegateOp(
        name=name,
        inputs=tuple(inputs),
        output=types[ids["output_id"]],
        clamp=(limits["output_min"], limits["output_max"]) if limits else None,
        handle=node.get("debug_handle", NO_HANDLE),
    )
