"""What a file really runs: integer and float heavy ops, read from the file itself."""

import json
import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import onnx
import onnxruntime as ort

from benchmarks.runtimes import Program, Runtime, session_options

HEAVY_XNNPACK = {
    "XNNConv2d": "conv",
    "XNNDepthwiseConv2d": "conv",
    "XNNConvTranspose2d": "conv",
    "XNNFullyConnected": "linear",
    "XNNBatchMatrixMultiply": "matmul",
    "XNNAdd": "add",
}
HEAVY_ONNX = {
    "QLinearConv": ("conv", True),
    "ConvInteger": ("conv", True),
    "Conv": ("conv", False),
    "FusedConv": ("conv", False),
    "QGemm": ("linear", True),
    "QLinearMatMul": ("linear", True),
    "MatMulIntegerToFloat": ("linear", True),
    "DynamicQuantizeMatMul": ("linear", True),
    "MatMulInteger": ("linear", True),
    "MatMul": ("linear", False),
    "Gemm": ("linear", False),
    "FusedMatMul": ("linear", False),
    "FusedGemm": ("linear", False),
    "TransposedMatMul": ("linear", False),
    "QLinearAdd": ("add", True),
}
FLOAT_TYPES = ("xnn_datatype_fp32", "xnn_datatype_fp16")
# the first bytes of an XNNPACK payload: flatbuffer offset and size at these places
XNN_OFFSET, XNN_SIZE = slice(10, 14), slice(14, 18)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpCount:
    """Heavy ops of one file by arithmetic, and what was left around them."""

    integer: dict[str, int]
    floating: dict[str, int]
    quantize_dequantize: int
    partitions: int
    undelegated: int

    def ratio(self, kind: str) -> str:
        """Return `integer/float` of one kind of op, as text."""
        return f"{self.integer.get(kind, 0)}/{self.floating.get(kind, 0)}"


def count_ops(program: Program) -> OpCount:
    """Count the ops of a program after its runtime's or delegate's own optimisation."""
    if program.runtime is Runtime.EXECUTORCH:
        return count_pte(program.data)
    return count_onnx(program.data)


def count_onnx(data: bytes) -> OpCount:
    """Count ops after ONNX Runtime's optimisation for this CPU."""
    with tempfile.TemporaryDirectory() as folder:
        options = session_options()
        options.optimized_model_filepath = str(Path(folder) / "optimized.onnx")
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
        ort.InferenceSession(data, options, providers=["CPUExecutionProvider"])
        graph = onnx.load(options.optimized_model_filepath).graph
    ops = Counter(node.op_type for node in graph.node)
    integer: Counter[str] = Counter()
    floating: Counter[str] = Counter()
    for op, (kind, is_integer) in HEAVY_ONNX.items():
        (integer if is_integer else floating)[kind] += ops[op]
    return OpCount(
        integer=dict(+integer),
        floating=dict(+floating),
        quantize_dequantize=ops["QuantizeLinear"] + ops["DequantizeLinear"],
        partitions=1,
        undelegated=0,
    )


def count_pte(data: bytes) -> OpCount:
    """Count the nodes of every XNNPACK delegate, and the calls left outside."""
    from executorch.exir._serialize._program import deserialize_pte_binary
    from executorch.exir.schema import DelegateCall, KernelCall

    program = deserialize_pte_binary(data).program
    plan = next(plan for plan in program.execution_plan if plan.name == "forward")
    integer: Counter[str] = Counter()
    floating: Counter[str] = Counter()
    converts = 0
    for delegate in plan.delegates:
        graph = read_xnnpack(program.backend_delegate_data[delegate.processed.index].data)
        types = {key: value for entry in graph["xvalues"] for key, value in datatype_by_id(entry)}
        for node in graph["xnodes"]:
            kind = HEAVY_XNNPACK.get(node["xnode_union_type"])
            converts += node["xnode_union_type"] == "XNNConvert"
            if kind is None:
                continue
            is_float = types[node["xnode_union"]["input1_id"]] in FLOAT_TYPES
            (floating if is_float else integer)[kind] += 1
    calls = [entry.instr_args for chain in plan.chains for entry in chain.instructions]
    names = [plan.operators[call.op_index].name for call in calls if isinstance(call, KernelCall)]
    return OpCount(
        integer=dict(integer),
        floating=dict(floating),
        quantize_dequantize=converts + sum("quantize_per" in name for name in names),
        partitions=sum(isinstance(call, DelegateCall) for call in calls),
        undelegated=len(names),
    )


def datatype_by_id(entry: dict) -> list[tuple[int, str]]:
    """Return the id and datatype of one XNNPACK value."""
    tensor = entry["xvalue_union"]
    tensor = tensor.get("tensor_value", tensor)
    return [(tensor["id_out"], tensor["datatype"])]


def read_xnnpack(payload: bytes) -> dict:
    """Decode an XNNPACK delegate's flatbuffer with the schema and compiler ExecuTorch ships."""
    offset = int.from_bytes(payload[XNN_OFFSET], "little")
    size = int.from_bytes(payload[XNN_SIZE], "little")
    schema = files("executorch.backends.xnnpack.serialization") / "schema.fbs"
    compiler = files("executorch.data.bin") / "flatc"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "graph.bin"
        source.write_bytes(payload[offset : offset + size])
        command = [str(compiler), "--json", "--strict-json", "--defaults-json", "--raw-binary"]
        subprocess.run([*command, "-o", folder, str(schema), "--", str(source)], check=True)
        text = (Path(folder) / "graph.json").read_text()
    # flatc prints an unbounded clamp as inf, which JSON spells Infinity
    return json.loads(re.sub(r"(?<=: )(-?)inf\b", r"\1Infinity", text))
