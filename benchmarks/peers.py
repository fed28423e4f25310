"""The peers, called as their documentation says, each reduced to a loaded `Program`.

torchao's PT2E with ExecuTorch's XNNPACKQuantizer, ONNX Runtime's static quantizer, torchao's PT2E
exported to ONNX, and the float model on both runtimes.
"""

import copy
import io
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import torch
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import (
    XNNPACKQuantizer,
    get_symmetric_quantization_config,
)
from executorch.exir import to_edge_transform_and_lower
from onnxruntime.quantization import (
    CalibrationDataReader,
    CalibrationMethod,
    QuantFormat,
    QuantType,
    quantize_static,
)
from onnxruntime.quantization.shape_inference import quant_pre_process
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import GraphModule
from torchao.quantization.pt2e import MinMaxObserver
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

from benchmarks.measure import Stopwatch
from benchmarks.runtimes import Program, Runtime, load_program

Batches = Sequence[tuple[Tensor, ...]]


POOLS = (torch.ops.aten.max_pool2d.default, torch.ops.aten.avg_pool2d.default)


def lower_to_pte(ep: ExportedProgram) -> bytes:
    """Lower with ExecuTorch's own recipe for XNNPACK.

    Its partitioner reads a pooling's stride without asking whether there is one, and ends with an
    IndexError: the default, the size of the window, is written out for it.
    """
    for node in ep.graph.nodes:
        if node.target in POOLS and len(node.args) == 2:
            node.args = (*node.args, node.args[1])
    edge = to_edge_transform_and_lower(ep, partitioner=[XnnpackPartitioner()])
    return edge.to_executorch().buffer


def export_onnx(ep: ExportedProgram) -> bytes:
    """Export with `torch.onnx.export(dynamo=True)`, weights inside the file."""
    program = torch.onnx.export(ep, dynamo=True, verbose=False)
    buffer = io.BytesIO()
    onnx.save_model(program.model_proto, buffer)
    return buffer.getvalue()


def executorch_float(model: nn.Module, inputs: tuple[Tensor, ...]) -> Program:
    """Return the float model through XNNPACK."""
    watch = Stopwatch()
    ep = watch.run("export", lambda: torch.export.export(model, inputs))
    data = watch.run("lower", lambda: lower_to_pte(ep))
    return load_program("float", Runtime.EXECUTORCH, data, watch.stages)


def onnx_float(model: nn.Module, inputs: tuple[Tensor, ...]) -> Program:
    """Return the float model through ONNX Runtime."""
    watch = Stopwatch()
    ep = watch.run("export", lambda: torch.export.export(model, inputs))
    data = watch.run("lower", lambda: export_onnx(ep))
    return load_program("float", Runtime.ONNXRUNTIME, data, watch.stages)


def xnnpack_quantizer(*, min_max: bool = False) -> XNNPACKQuantizer:
    """Return XNNPACKQuantizer for static int8, weights per channel.

    Args:
        min_max: Observe activations with min-max instead of its default, histograms.
    """
    config = get_symmetric_quantization_config(is_per_channel=True)
    if min_max:
        activation = replace(
            config.input_activation,
            observer_or_fake_quant_ctr=MinMaxObserver.with_args(eps=2**-12),
        )
        config = replace(config, input_activation=activation, output_activation=activation)
    return XNNPACKQuantizer().set_global(config)


def torchao_quantize(
    model: nn.Module, inputs: tuple[Tensor, ...], batches: Batches, watch: Stopwatch
) -> GraphModule:
    """Quantize with torchao's PT2E and XNNPACKQuantizer as it comes."""
    quantizer = xnnpack_quantizer()
    ep = watch.run("export", lambda: torch.export.export(copy.deepcopy(model), inputs))
    gm = watch.run("prepare", lambda: prepare_pt2e(ep.module(), quantizer))
    watch.run("calibrate", lambda: feed(gm, batches))
    return watch.run("convert", lambda: convert_pt2e(gm))


def feed(model: nn.Module, batches: Batches) -> None:
    """Run every batch through a model, without gradients."""
    with torch.no_grad():
        for batch in batches:
            model(*batch)


def executorch_int8(model: nn.Module, inputs: tuple[Tensor, ...], batches: Batches) -> Program:
    """Return torchao's PT2E lowered by ExecuTorch to XNNPACK."""
    watch = Stopwatch()
    gm = torchao_quantize(model, inputs, batches, watch)
    ep = watch.run("re-export", lambda: torch.export.export(gm, inputs))
    # links the portable q/dq kernels' out variants, which emitting undelegated q/dq needs
    import executorch.kernels.quantized  # noqa: F401

    data = watch.run("lower", lambda: lower_to_pte(ep))
    return load_program("torchao + XNNPACKQuantizer", Runtime.EXECUTORCH, data, watch.stages)


def torchao_onnx(model: nn.Module, inputs: tuple[Tensor, ...], batches: Batches) -> Program:
    """Return torchao's PT2E exported to ONNX."""
    watch = Stopwatch()
    gm = torchao_quantize(model, inputs, batches, watch)
    ep = watch.run("re-export", lambda: torch.export.export(gm, inputs))
    data = watch.run("lower", lambda: export_onnx(ep))
    return load_program("torchao PT2E -> ONNX", Runtime.ONNXRUNTIME, data, watch.stages)


class BatchReader(CalibrationDataReader):
    """Hands calibration batches to ONNX Runtime's quantizer."""

    def __init__(self, names: Sequence[str], batches: Batches) -> None:
        self.feeds = iter(
            [
                {name: value.numpy() for name, value in zip(names, batch, strict=True)}
                for batch in batches
            ]
        )

    def get_next(self) -> dict[str, np.ndarray] | None:
        """Return the next feed, or None at the end."""
        return next(self.feeds, None)


def onnx_static(
    float_model: bytes, batches: Batches, *, matmul_only: bool = False, method: str = "MinMax"
) -> Program:
    """Return `quantize_static` of a float `.onnx`: QDQ, U8S8, weights per channel.

    Args:
        float_model: The float file's bytes.
        batches: Calibration data.
        matmul_only: Quantize only MatMul (and the Gemm that preprocessing fuses it into), ONNX
            Runtime's usual advice for transformers.
        method: How ranges are found: MinMax, Entropy or Percentile.
    """
    watch = Stopwatch()
    with tempfile.TemporaryDirectory() as folder:
        source, ready, target = (str(Path(folder) / f"{name}.onnx") for name in "abc")
        Path(source).write_bytes(float_model)
        watch.run("prepare", lambda: quant_pre_process(source, ready, skip_symbolic_shape=True))
        names = [value.name for value in onnx.load(ready).graph.input]
        watch.run(
            "quantize",
            lambda: quantize_static(
                ready,
                target,
                BatchReader(names, batches),
                quant_format=QuantFormat.QDQ,
                op_types_to_quantize=["MatMul", "Gemm"] if matmul_only else None,
                per_channel=True,
                activation_type=QuantType.QUInt8,
                weight_type=QuantType.QInt8,
                calibrate_method=CalibrationMethod[method],
            ),
        )
        data = Path(target).read_bytes()
    label = "quantize_static, MatMul only" if matmul_only else "quantize_static"
    return load_program(label, Runtime.ONNXRUNTIME, data, watch.stages)
