"""The operators `norm_quantize`, `norm_quantize_per_token` and `norm_quantize_per_token_e4m3`.

Also: where a graph calls them.
"""

from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from pt2e_quant.graph.op_table import OpRow
from pt2e_quant.kernels.cost import Cost, moved_bytes
from pt2e_quant.kernels.fused_op import define, triton_kernel
from pt2e_quant.kernels.kernel import Device, Kernel
from pt2e_quant.kernels.norm_quantize import reference
from pt2e_quant.kernels.norm_quantize.norm import NORM_SCHEMA
from pt2e_quant.kernels.norm_quantize.read_norm import CONSTRAINTS, NORMS, read_norm
from pt2e_quant.kernels.quantized_values import REWRITTEN_RESULT
from pt2e_quant.kernels.shape_classes import by_columns
from pt2e_quant.kernels.site import Site

_GPU = "pt2e_quant.kernels.norm_quantize.gpu"


def _fake(x: Tensor, *rest: Any, out_dtype: torch.dtype = torch.int8, **named: Any) -> Tensor:
    return x.new_empty(x.shape, dtype=out_dtype)


def _fake_per_token(x: Tensor, *rest: Any, **named: Any) -> tuple[Tensor, Tensor, Tensor]:
    rows = (*x.shape[:-1], 1)
    return (
        x.new_empty(x.shape, dtype=torch.int8),
        x.new_empty(rows, dtype=torch.float32),
        x.new_empty(rows, dtype=torch.int32),
    )


def _fake_per_token_e4m3(x: Tensor, *rest: Any, **named: Any) -> tuple[Tensor, Tensor]:
    scale = x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
    return x.new_empty(x.shape, dtype=torch.float8_e4m3fn), scale


NormQuantize = define(
    f"norm_quantize(Tensor x, str kind, {NORM_SCHEMA}, *, ScalarType out_dtype=int8, "
    "float out_scale=1.0, int out_zero_point=0, int out_min=-128, int out_max=127, "
    'str label="") -> Tensor',
    reference=reference.norm_quantize,
    triton=triton_kernel(_GPU, "norm_quantize"),
    fake=_fake,
)
"""int8, uint8 or float8_e4m3fn[..., K] of the normalized rows of x, to static qparams.

    x: float32, float16 or bfloat16[..., K], K of 1 .. 16384.
    kind, weight, …, value_dtype: of `norm.Norm`.
    out_dtype, …, out_max: of `epilogue.Epilogue`.
    label: the node, for the profiler.
"""

NormQuantizePerToken = define(
    f"norm_quantize_per_token(Tensor x, str kind, {NORM_SCHEMA}, *, int quant_min=-128, "
    'int quant_max=127, str label="") -> (Tensor, Tensor, Tensor)',
    reference=reference.norm_quantize_per_token,
    triton=triton_kernel(_GPU, "norm_quantize_per_token"),
    fake=_fake_per_token,
)
"""Integers int8[..., K], scales float32[..., 1] and zero points int32[..., 1] of normalized rows.

    x: float32, float16 or bfloat16[..., K], K of 1 .. 16384.
    kind, weight, …, value_dtype: of `norm.Norm`.
    quant_min, quant_max: what the integers are clamped to; qparams are chosen for -128..127.
    label: the node, for the profiler.
"""

NormQuantizePerTokenE4m3 = define(
    f"norm_quantize_per_token_e4m3(Tensor x, str kind, {NORM_SCHEMA}, *, "
    'str label="") -> (Tensor, Tensor)',
    reference=reference.norm_quantize_per_token_e4m3,
    triton=triton_kernel(_GPU, "norm_quantize_per_token_e4m3"),
    fake=_fake_per_token_e4m3,
)
"""Codes float8_e4m3fn[..., K] and scales float32[..., 1] of normalized rows.

    x: float32, float16 or bfloat16[..., K], K of 1 .. 16384.
    kind, weight, …, value_dtype: of `norm.Norm`.
    label: the node, for the profiler.
"""


def cost(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Cost:
    """Bytes of one call, and about ten operations an element."""
    return Cost(
        bytes=moved_bytes(x, weight, bias) + x.numel(),
        operations=10 * x.numel(),
    )


def build(site: Site) -> Node:
    """`norm_quantize` to the qparams of the quantizes behind the norm."""
    norm, out, now = read_norm(site.match), site.output, site.editor.now
    assert out is not None  # REWRITTEN_RESULT
    return site.call(
        NormQuantize,
        now(norm.x),
        str(norm.kind),
        None if norm.weight is None else now(norm.weight),
        None if norm.bias is None else now(norm.bias),
        norm.eps,
        norm.rounds_first,
        norm.value_dtype,
        out_dtype=out.dtype,
        out_scale=out.scale,
        out_zero_point=out.zero_point,
        out_min=out.quant_min,
        out_max=out.quant_max,
        label=site.label,
    )


def node_cost(node: Node) -> Cost:
    """Of a fused call in a graph."""
    x, _, weight, bias = (a.meta["val"] if isinstance(a, Node) else None for a in node.args[:4])
    assert x is not None  # rows by schema
    return cost(x, weight, bias)


KERNELS = tuple(
    Kernel(
        # No slots: what reads the norm quantizes it, or nothing does.
        row=OpRow(
            name=name,
            find=patterns,
            slots=(),
            constraints=(*CONSTRAINTS, REWRITTEN_RESULT),
            lowers_to="pt2e_quant::norm_quantize",
            note="float rows to integers or e4m3; per token to `norm_quantize_per_token`",
        ),
        device=Device.CUDA,
        op="norm_quantize",
        build=build,
        shape_class=by_columns,
        cost=node_cost,
        writes_e4m3=True,
    )
    for name, patterns in NORMS.items()
)
