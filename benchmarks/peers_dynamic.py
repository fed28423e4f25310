"""The peers' ways to dynamic int8 and 4-bit weights on XNNPACK, for a model of any inputs.

torchao's `quantize_` and PT2E with ExecuTorch's XNNPACKQuantizer, lowered as ExecuTorch's own
export of language models does; `llm_peers` has the same for a Llama with its KV cache.
"""

import copy

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
from torch import Tensor, nn
from torch.export import ExportedProgram
from torchao.quantization import Int8DynamicActivationIntxWeightConfig, quantize_
from torchao.quantization.granularity import PerAxis, PerGroup
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

from benchmarks.measure import Stopwatch
from benchmarks.runtimes import Program, Runtime, load_program

Inputs = tuple[Tensor, ...]


def lower_dynamic(ep: ExportedProgram) -> bytes:
    """Lower with the partitioner of dynamic linears first, then the general one."""
    import executorch.kernels.quantized  # noqa: F401  # out variants of q/dq left outside

    partitioners = [XnnpackDynamicallyQuantizedPartitioner(), XnnpackPartitioner()]
    with torch.no_grad():
        return to_edge_transform_and_lower(ep, partitioner=partitioners).to_executorch().buffer


def executorch_8da4w(model: nn.Module, inputs: Inputs, group_size: int | None) -> Program:
    """Return torchao's `quantize_`: int8 activations per token, int4 weights.

    Args:
        model: In float; it is not changed.
        inputs: To export with.
        group_size: Of the weights' scales; None for one a row.
    """
    watch = Stopwatch()
    granularity = PerAxis(0) if group_size is None else PerGroup(group_size)
    config = Int8DynamicActivationIntxWeightConfig(
        weight_dtype=torch.int4, weight_granularity=granularity
    )
    changed = copy.deepcopy(model)
    watch.run("quantize", lambda: quantize_(changed, config))
    ep = watch.run("export", lambda: torch.export.export(changed, inputs))
    data = watch.run("lower", lambda: lower_dynamic(ep))
    label = "torchao 8da4w" + (f" g{group_size}" if group_size else "")
    return load_program(label, Runtime.EXECUTORCH, data, watch.stages)


def executorch_8da8w(model: nn.Module, inputs: Inputs) -> Program:
    """Return torchao's `quantize_`: int8 activations per token, int8 weights per row."""
    watch = Stopwatch()
    config = Int8DynamicActivationIntxWeightConfig(
        weight_dtype=torch.int8, weight_granularity=PerAxis(0)
    )
    changed = copy.deepcopy(model)
    watch.run("quantize", lambda: quantize_(changed, config))
    ep = watch.run("export", lambda: torch.export.export(changed, inputs))
    data = watch.run("lower", lambda: lower_dynamic(ep))
    return load_program("torchao 8da8w", Runtime.EXECUTORCH, data, watch.stages)


def executorch_int8_dynamic(model: nn.Module, inputs: Inputs) -> Program:
    """Return torchao's PT2E with XNNPACKQuantizer: dynamic activations, weights per channel."""
    watch = Stopwatch()
    config = get_symmetric_quantization_config(is_per_channel=True, is_dynamic=True)
    quantizer = XNNPACKQuantizer().set_global(config)
    ep = watch.run("export", lambda: torch.export.export(copy.deepcopy(model), inputs))
    prepared = watch.run("prepare", lambda: prepare_pt2e(ep.module(), quantizer))
    with torch.no_grad():
        watch.run("calibrate", lambda: prepared(*inputs))
    quantized = watch.run("convert", lambda: convert_pt2e(prepared))
    again = watch.run("re-export", lambda: torch.export.export(quantized, inputs))
    data = watch.run("lower", lambda: lower_dynamic(again))
    return load_program("XNNPACKQuantizer dynamic", Runtime.EXECUTORCH, data, watch.stages)
