"""The peers' ways below 8 bits and to dynamic int8, called as their documentation says.

torchao's `quantize_` and PT2E lowered by ExecuTorch; onnxruntime's `quantize_dynamic` and
`MatMulNBitsQuantizer` on a float `.onnx`. How a model is exported is the caller's: a Llama with its
KV cache and an encoder with fixed shapes go the same way from there.
"""

import copy
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import onnx
import torch
from executorch.backends.xnnpack.partition.xnnpack_partitioner import (
    XnnpackDynamicallyQuantizedPartitioner,
    XnnpackPartitioner,
)
from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import (
    XNNPACKQuantizer,
    get_symmetric_quantization_config,
)
from executorch.exir import to_edge_transform_and_lower
from onnxruntime.quantization import QuantType, quantize_dynamic
from onnxruntime.quantization.matmul_nbits_quantizer import (
    DefaultWeightOnlyQuantConfig,
    HQQWeightOnlyQuantConfig,
    MatMulNBitsQuantizer,
)
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import GraphModule
from torchao.quantization import Int8DynamicActivationIntxWeightConfig, quantize_
from torchao.quantization.granularity import PerAxis, PerGroup
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

from benchmarks.measure import Stopwatch
from benchmarks.peers import export_onnx
from benchmarks.runtimes import Program, Runtime, load_program

ALGORITHMS = ("affine", "symmetric", "hqq")
"""onnxruntime's default with and without zero points, and its HQQ.

Its RTN, k-quant and GPTQ need the package neural-compressor.
"""
ACCURACY_LEVELS = {1: "float", 4: "int8"}
"""MatMulNBits's `accuracy_level`, and the activations that it computes with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exporter:
    """How one model is exported.

    Args:
        float_model: from the module.
        quantized: from the GraphModule that PT2E made of it.
        sample: inputs of one trial run.
    """

    float_model: Callable[[nn.Module], ExportedProgram]
    quantized: Callable[[GraphModule], ExportedProgram]
    sample: tuple[Tensor, ...]


def plain_exporter(inputs: tuple[Tensor, ...]) -> Exporter:
    """Return the exporter of a model with fixed shapes and no state."""

    def export(module: nn.Module) -> ExportedProgram:
        return torch.export.export(module, inputs)

    return Exporter(float_model=export, quantized=export, sample=inputs)


def lower_to_pte(ep: ExportedProgram, *, is_dynamic: bool) -> bytes:
    """Lower as ExecuTorch's own export of language models does with its "extended ops".

    Dynamically quantized linears are taken first, one delegate each; what is left goes to the
    general partitioner.
    """
    import executorch.kernels.quantized  # noqa: F401  # out variants of q/dq left outside

    partitioners = [XnnpackPartitioner()]
    if is_dynamic:
        partitioners.insert(0, XnnpackDynamicallyQuantizedPartitioner())
    # a program that writes buffers cannot be emitted with gradients on
    with torch.no_grad():
        edge = to_edge_transform_and_lower(ep, partitioner=partitioners)
        return edge.to_executorch().buffer


def executorch_float(model: nn.Module, exporter: Exporter) -> Program:
    """Return the float model through XNNPACK."""
    watch = Stopwatch()
    ep = watch.run("export", lambda: exporter.float_model(model))
    data = watch.run("lower", lambda: lower_to_pte(ep, is_dynamic=False))
    return load_program("float", Runtime.EXECUTORCH, data, watch.stages)


def executorch_quantize(
    model: nn.Module, exporter: Exporter, group_size: int | None, *, bits: int = 4
) -> Program:
    """Return torchao's `quantize_`: int8 activations per token, integer weights.

    The embedding stays in float: `IntxWeightOnlyConfig` on it leaves a
    `torchao::dequantize_affine`, for which ExecuTorch 1.4 misses an out variant.

    Args:
        model: In float; it is not changed.
        exporter: Of this model.
        group_size: Of the weights' scales; None for one a row.
        bits: Of a weight, 4 or 8.
    """
    watch = Stopwatch()
    config = Int8DynamicActivationIntxWeightConfig(
        weight_dtype={4: torch.int4, 8: torch.int8}[bits],
        weight_granularity=PerAxis(0) if group_size is None else PerGroup(group_size),
    )
    changed = copy.deepcopy(model)
    watch.run("quantize", lambda: quantize_(changed, config))
    ep = watch.run("export", lambda: exporter.float_model(changed))
    data = watch.run("lower", lambda: lower_to_pte(ep, is_dynamic=True))
    label = f"torchao 8da{bits}w" + (f" g{group_size}" if group_size else "")
    return load_program(label, Runtime.EXECUTORCH, data, watch.stages)


def executorch_int8_dynamic(model: nn.Module, exporter: Exporter) -> Program:
    """Return torchao's PT2E with XNNPACKQuantizer: dynamic activations, weights per channel."""
    watch = Stopwatch()
    config = get_symmetric_quantization_config(is_per_channel=True, is_dynamic=True)
    quantizer = XNNPACKQuantizer().set_global(config)
    ep = watch.run("export", lambda: exporter.float_model(copy.deepcopy(model)))
    prepared = watch.run("prepare", lambda: prepare_pt2e(ep.module(), quantizer))
    with torch.no_grad():
        watch.run("calibrate", lambda: prepared(*exporter.sample))
    quantized = watch.run("convert", lambda: convert_pt2e(prepared))
    again = watch.run("re-export", lambda: exporter.quantized(quantized))
    data = watch.run("lower", lambda: lower_to_pte(again, is_dynamic=True))
    return load_program("XNNPACKQuantizer dynamic", Runtime.EXECUTORCH, data, watch.stages)


def onnx_float(model: nn.Module, exporter: Exporter) -> Program:
    """Return the float model through ONNX Runtime."""
    watch = Stopwatch()
    ep = watch.run("export", lambda: exporter.float_model(model))
    data = watch.run("lower", lambda: export_onnx(ep))
    return load_program("float", Runtime.ONNXRUNTIME, data, watch.stages)


def onnx_dynamic(float_model: bytes) -> Program:
    """Return `quantize_dynamic`: uint8 activations per tensor at run time, int8 per channel."""

    def quantize(source: str, target: str) -> None:
        quantize_dynamic(source, target, per_channel=True, weight_type=QuantType.QInt8)

    return _through_files("quantize_dynamic", float_model, quantize)


def onnx_matmul_nbits(
    float_model: bytes,
    group_size: int,
    accuracy_level: int,
    *,
    algorithm: str = "symmetric",
    with_tables: bool = False,
    label: str | None = None,
) -> Program:
    """Return 4-bit `MatMulNBits` of every MatMul with a constant, by `MatMulNBitsQuantizer`.

    Args:
        float_model: The float file's bytes. Where embedding and output layer are tied there, it
            leaves both in float.
        group_size: How many weights of a column share a scale.
        accuracy_level: A key of `ACCURACY_LEVELS`.
        algorithm: One of `ALGORITHMS`.
        with_tables: Quantize embeddings too.
        label: Of the program; one made of the settings if None.
    """
    kinds = ("MatMul", "Gather") if with_tables else ("MatMul",)

    def quantize(source: str, target: str) -> None:
        if algorithm == "hqq":
            config = HQQWeightOnlyQuantConfig(
                block_size=group_size, bits=4, op_types_to_quantize=kinds
            )
        else:
            config = DefaultWeightOnlyQuantConfig(
                block_size=group_size,
                is_symmetric=algorithm == "symmetric",
                accuracy_level=accuracy_level,
                bits=4,
                op_types_to_quantize=kinds,
            )
        quantizer = MatMulNBitsQuantizer(onnx.load(source), algo_config=config)
        quantizer.process()
        model = quantizer.model.model
        for node in model.graph.node:
            # its HQQ does not hand the level on
            if node.op_type == "MatMulNBits" and algorithm == "hqq":
                node.attribute.append(onnx.helper.make_attribute("accuracy_level", accuracy_level))
        onnx.save(model, target)

    made = f"MatMulNBits g{group_size} {algorithm} {ACCURACY_LEVELS[accuracy_level]}"
    return _through_files(label or made, float_model, quantize)


def _through_files(label: str, float_model: bytes, quantize: Callable[[str, str], None]) -> Program:
    """Run a quantizer of onnxruntime from a file to a file and load what it wrote."""
    watch = Stopwatch()
    with tempfile.TemporaryDirectory() as folder:
        source, target = (str(Path(folder) / f"{name}.onnx") for name in ("float", "quantized"))
        Path(source).write_bytes(float_model)
        watch.run("quantize", lambda: quantize(source, target))
        data = Path(target).read_bytes()
    return load_program(label, Runtime.ONNXRUNTIME, data, watch.stages)
