"""The peers on a Llama with its KV cache, called as their documentation says.

torchao's `quantize_` and PT2E lowered by ExecuTorch; onnxruntime's `quantize_dynamic` and
`MatMulNBitsQuantizer` on the float `.onnx`; the float model on both runtimes.
"""

import copy
import tempfile
from collections.abc import Callable
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
from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer
from torch import nn
from torch.export import ExportedProgram
from torchao.quantization import Int8DynamicActivationIntxWeightConfig, quantize_
from torchao.quantization.granularity import PerGroup
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
from transformers import LlamaForCausalLM

from benchmarks.llm_ours import (
    FLOAT_TABLE,
    PROMPT,
    export_with_state,
    export_without_state,
    prompt_of_zeros,
)
from benchmarks.measure import Stopwatch
from benchmarks.peers import export_onnx
from benchmarks.runtimes import Program, Runtime, load_program

ACCURACY_LEVELS = {1: "float", 4: "int8"}
"""MatMulNBits's `accuracy_level`, and the activations that it computes with."""


def lower_to_pte(ep: ExportedProgram, *, is_dynamic: bool) -> bytes:
    """Lower as ExecuTorch's own Llama export does with its "extended ops".

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


def executorch_float(model: LlamaForCausalLM) -> Program:
    """Return the float model through XNNPACK."""
    watch = Stopwatch()
    ep = watch.run("export", lambda: export_with_state(model))
    data = watch.run("lower", lambda: lower_to_pte(ep, is_dynamic=False))
    return load_program("float", Runtime.EXECUTORCH, data, watch.stages)


def executorch_8da4w(model: LlamaForCausalLM, group_size: int) -> Program:
    """Return torchao's `quantize_`: int8 activations per token, int4 weights in groups.

    The embedding stays in float: `IntxWeightOnlyConfig` on it leaves a
    `torchao::dequantize_affine`, for which ExecuTorch 1.4 misses an out variant.
    """
    watch = Stopwatch()
    config = Int8DynamicActivationIntxWeightConfig(
        weight_dtype=torch.int4, weight_granularity=PerGroup(group_size)
    )
    changed = copy.deepcopy(model)
    watch.run("quantize", lambda: quantize_(changed, config))
    ep = watch.run("export", lambda: export_with_state(changed))
    data = watch.run("lower", lambda: lower_to_pte(ep, is_dynamic=True))
    label = f"torchao 8da4w g{group_size}"
    return load_program(label, Runtime.EXECUTORCH, data, watch.stages)


def executorch_int8_dynamic(model: LlamaForCausalLM) -> Program:
    """Return torchao's PT2E with XNNPACKQuantizer, dynamic, weights per channel."""
    watch = Stopwatch()
    quantizer = XNNPACKQuantizer().set_global(
        get_symmetric_quantization_config(is_per_channel=True, is_dynamic=True)
    )
    ep = watch.run("export", lambda: export_with_state(copy.deepcopy(model)))
    gm = watch.run("prepare", lambda: prepare_pt2e(ep.module(), quantizer))
    with torch.no_grad():
        watch.run("calibrate", lambda: gm(*prompt_of_zeros()))
    gm = watch.run("convert", lambda: convert_pt2e(gm))
    tokens = torch.export.Dim("tokens", min=1, max=PROMPT)
    shapes = {"input_ids": {1: tokens}, "positions": {0: tokens}}
    again = watch.run(
        "re-export", lambda: torch.export.export(gm, prompt_of_zeros(), dynamic_shapes=shapes)
    )
    data = watch.run("lower", lambda: lower_to_pte(again, is_dynamic=True))
    return load_program("XNNPACKQuantizer dynamic", Runtime.EXECUTORCH, data, watch.stages)


def untied(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """Return a copy whose output layer is a matrix of its own: peers quantize no tied one."""
    changed = copy.deepcopy(model)
    changed.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    changed.config.tie_word_embeddings = False
    return changed


def onnx_float(model: LlamaForCausalLM) -> Program:
    """Return the float model through ONNX Runtime."""
    watch = Stopwatch()
    ep = watch.run("export", lambda: export_without_state(model))
    data = watch.run("lower", lambda: export_onnx(ep))
    return load_program("float", Runtime.ONNXRUNTIME, data, watch.stages)


def onnx_dynamic(float_model: bytes) -> Program:
    """Return onnxruntime's `quantize_dynamic` of a float `.onnx`, weights int8 per channel."""

    def quantize(source: str, target: str) -> None:
        quantize_dynamic(source, target, per_channel=True, weight_type=QuantType.QInt8)

    return through_files("quantize_dynamic", float_model, quantize)


def onnx_matmul_nbits(
    float_model: bytes, group_size: int, accuracy_level: int, *, is_untied: bool = False
) -> Program:
    """Return onnxruntime's 4-bit `MatMulNBits` of a float `.onnx`, symmetric.

    Args:
        float_model: The float file's bytes. Where embedding and output layer are tied there, it
            leaves both in float.
        group_size: How many weights of a row share a scale.
        accuracy_level: A key of `ACCURACY_LEVELS`.
        is_untied: The file is of an `untied` model: quantize its embedding too.
    """

    def quantize(source: str, target: str) -> None:
        quantizer = MatMulNBitsQuantizer(
            onnx.load(source),
            block_size=group_size,
            is_symmetric=True,
            accuracy_level=accuracy_level,
            op_types_to_quantize=("MatMul", "Gather") if is_untied else ("MatMul",),
        )
        quantizer.process()
        quantizer.model.save_model_to_file(target)

    label = f"MatMulNBits g{group_size} {ACCURACY_LEVELS[accuracy_level]}"
    label += "" if is_untied else FLOAT_TABLE
    return through_files(label, float_model, quantize)


def through_files(label: str, float_model: bytes, quantize: Callable[[str, str], None]) -> Program:
    """Run a quantizer of onnxruntime from a file to a file and load what it wrote."""
    watch = Stopwatch()
    with tempfile.TemporaryDirectory() as folder:
        source, target = (str(Path(folder) / f"{name}.onnx") for name in ("float", "quantized"))
        Path(source).write_bytes(float_model)
        watch.run("quantize", lambda: quantize(source, target))
        data = Path(target).read_bytes()
    return load_program(label, Runtime.ONNXRUNTIME, data, watch.stages)
