"""onnxruntime's own low-bit quantizers on a float `.onnx`: MatMulNBits and `quantize_dynamic`."""

import tempfile
from collections.abc import Callable
from pathlib import Path

import onnx
from onnxruntime.quantization import QuantType, quantize_dynamic
from onnxruntime.quantization.matmul_nbits_quantizer import (
    DefaultWeightOnlyQuantConfig,
    HQQWeightOnlyQuantConfig,
    MatMulNBitsQuantizer,
)

from benchmarks.measure import Stopwatch
from benchmarks.runtimes import Program, Runtime, load_program

ALGORITHMS = ("affine", "symmetric", "hqq")
"""What `matmul_nbits` takes: onnxruntime's default with and without zero points, and its HQQ.

Its RTN, k-quant and GPTQ need the package neural-compressor.
"""


def matmul_nbits(
    float_model: bytes, group_size: int, algorithm: str = "affine", accuracy_level: int = 0
) -> Program:
    """Return 4-bit `MatMulNBits` of every MatMul with a constant, by `MatMulNBitsQuantizer`.

    Args:
        float_model: The float file's bytes.
        group_size: How many weights of a column share a scale.
        algorithm: One of `ALGORITHMS`.
        accuracy_level: 0 computes in float32, 4 rounds activations to int8.
    """

    def quantize(source: str, target: str) -> None:
        if algorithm == "hqq":
            config = HQQWeightOnlyQuantConfig(block_size=group_size, bits=4)
        else:
            config = DefaultWeightOnlyQuantConfig(
                block_size=group_size,
                is_symmetric=algorithm == "symmetric",
                accuracy_level=accuracy_level,
                bits=4,
            )
        quantizer = MatMulNBitsQuantizer(
            onnx.load(source),
            block_size=group_size,
            accuracy_level=accuracy_level,
            algo_config=config,
        )
        quantizer.process()
        model = quantizer.model.model
        for node in model.graph.node:
            # its HQQ does not hand the level on
            if node.op_type == "MatMulNBits" and algorithm == "hqq":
                node.attribute.append(onnx.helper.make_attribute("accuracy_level", accuracy_level))
        onnx.save(model, target)

    label = f"MatMulNBits g{group_size} {algorithm} level {accuracy_level}"
    return _through_files(label, float_model, quantize)


def dynamic(float_model: bytes, *, per_channel: bool = True, matmul_only: bool = False) -> Program:
    """Return `quantize_dynamic`: uint8 activations per tensor at run time, int8 weights.

    Args:
        float_model: The float file's bytes.
        per_channel: A scale for each output channel of a weight.
        matmul_only: Leave embeddings float.
    """

    def quantize(source: str, target: str) -> None:
        quantize_dynamic(
            source,
            target,
            per_channel=per_channel,
            weight_type=QuantType.QInt8,
            op_types_to_quantize=["MatMul"] if matmul_only else None,
        )

    label = f"quantize_dynamic{' per channel' if per_channel else ''}"
    return _through_files(label + (" MatMul" if matmul_only else ""), float_model, quantize)


def _through_files(label: str, float_model: bytes, quantize: Callable[[str, str], None]) -> Program:
    """Run a quantizer from a file to a file and load what it wrote."""
    watch = Stopwatch()
    with tempfile.TemporaryDirectory() as folder:
        source, target = (str(Path(folder) / f"{name}.onnx") for name in ("float", "quantized"))
        Path(source).write_bytes(float_model)
        watch.run("quantize", lambda: quantize(source, target))
        data = Path(target).read_bytes()
    return load_program(label, Runtime.ONNXRUNTIME, data, watch.stages)
