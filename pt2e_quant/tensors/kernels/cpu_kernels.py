"""Kernels for quantized tensors on CPUs: entries of the dispatch table."""

from functools import cache

import torch
from torch import Tensor, nn

from pt2e_quant.core.granularity import PerToken
from pt2e_quant.kernels.int4_linear.few_rows_op import LinearOfInt4
from pt2e_quant.kernels.int8_linear.codes_op import LinearOfCodes, linear_of_codes
from pt2e_quant.kernels.int8_linear.rows_op import linear_of_quantized_rows, written_out
from pt2e_quant.kernels.onednn.limbs_op import (
    join_limbs,
    limb_shifts,
    limbs_of_rows,
    linear_of_limbs_at_once,
)
from pt2e_quant.kernels.onednn.operators import QLinear
from pt2e_quant.kernels.quantize_per_token import cpu_dynamic
from pt2e_quant.kernels.quantize_per_token.reference import quantize_per_token
from pt2e_quant.tensors.form import TensorForm
from pt2e_quant.tensors.kernels.kernel import TensorKernel
from pt2e_quant.tensors.quantized_tensor import QuantizedTensor

_LIBRARY = torch.library.Library("pt2e_quant", "FRAGMENT")  # type: ignore[no-untyped-call]  # torch's own


@cache
def _zeros(count: int) -> Tensor:
    return torch.zeros(count, dtype=torch.int32)


def _product(x: Tensor, packed: Tensor, scale: Tensor, zero_point: int) -> Tensor:
    if x.numel() == 0:
        return torch.zeros((*x.shape[:-1], scale.shape[0]))
    made: Tensor = QLinear(
        x, 1.0, zero_point, packed, scale, _zeros(scale.shape[0]),
        None, 1.0, 0, torch.float32, "none", [0.0], "",
    )  # fmt: skip
    return made


def _fake_product(x: Tensor, packed: Tensor, scale: Tensor, zero_point: int) -> Tensor:
    return x.new_empty((*x.shape[:-1], packed.shape[-1]), dtype=torch.float32)


# Explicit: Inductor's own form of oneDNN's product takes constant weights alone.
_LIBRARY.define(  # type: ignore[no-untyped-call]
    "tensor_product(Tensor x, Tensor packed, Tensor scale, int zero_point) -> Tensor"
)
torch.library.impl(_LIBRARY, "tensor_product", "CompositeExplicitAutograd")(_product)
torch.library.register_fake("pt2e_quant::tensor_product", lib=_LIBRARY)(_fake_product)
_Product = torch.ops.pt2e_quant.tensor_product.default


def _is_traced(x: Tensor) -> bool:
    """True if a compiler follows the calls: it fuses those around the product."""
    return type(x) not in (Tensor, nn.Parameter) or torch.compiler.is_compiling()


def float_rows(x: Tensor, weight: QuantizedTensor, bias: Tensor | None) -> Tensor:
    """Float rows by an int8 weight, as two limbs of 8 bits."""
    p = weight.parts
    packed, scale = p["packed"], p["row_scale"]
    if not _is_traced(x):
        return linear_of_limbs_at_once(x, packed, scale, _zeros(scale.shape[0]), bias)
    limbs, step = limbs_of_rows(x, limb_shifts(x.dim()))
    return join_limbs(_Product(limbs, packed, scale, 128), step, bias)


def linear_of_rows(x: Tensor, weight: QuantizedTensor, bias: Tensor | None) -> Tensor:
    """Rows quantized to int8 at run time by an int8 weight."""
    p = weight.parts
    packed, scale = p["packed"], p["row_scale"]
    if not _is_traced(x):
        return linear_of_quantized_rows(x, packed, scale, bias)

    def product(rows: Tensor, packed: Tensor) -> Tensor:
        made: Tensor = _Product(rows, packed, torch.ones_like(scale), 0)
        return made

    return written_out(*quantize_per_token(x), packed, scale, None, product=product, bias=bias)


def is_per_token(form: TensorForm) -> bool:
    """True if activations are what `QuantizeRows` gives."""
    scheme = form.input
    return (
        scheme is not None
        and scheme.dtype is torch.int8
        and scheme.is_dynamic
        and not scheme.symmetric
        and isinstance(scheme.granularity, PerToken)
        and scheme.range == (-128, 127)
    )


def int4_rows(x: Tensor, weight: QuantizedTensor, bias: Tensor | None) -> Tensor:
    """Rows in bfloat16 by torch's product of 4-bit codes."""
    p, form = weight.parts, weight.form
    shape = form.block[1], p["scales_and_zeros"], form.shape[0]
    made: Tensor = LinearOfInt4(x, p["tiles"], *shape, bias)
    return made


def rows_by_codes(x: Tensor, weight: QuantizedTensor, bias: Tensor | None) -> Tensor:
    """Float rows by the integers of a weight, scaled afterwards."""
    p = weight.parts
    run = LinearOfCodes if _is_traced(x) else linear_of_codes
    made: Tensor = run(x, p["codes"], p["scale"].reshape(-1), p.get("zero_point"), bias)
    return made


def quantized_rows_by_codes(x: Tensor, weight: QuantizedTensor, bias: Tensor | None) -> Tensor:
    """Rows quantized to int8 at run time by the integers of a weight, both as floats."""
    quantize = quantize_per_token if _is_traced(x) else cpu_dynamic.quantize_per_token
    rows, scale, zero_point = quantize(x)
    sums = rows_by_codes(rows.float() - zero_point, weight, None)
    return sums * scale if bias is None else torch.addcmul(bias, sums, scale)


def has_plain_bytes(form: TensorForm) -> bool:
    """True of a matrix of 8-bit integers that has a scale for each row, or one."""
    scheme = form.scheme
    return (
        scheme.format is None
        and scheme.bits == 8
        and scheme.scales.is_plain
        and len(form.shape) == 2
        and form.is_scaled_by_rows
    )


CPU_KERNELS = (
    TensorKernel(name="linear_of_codes", op="linear", run=rows_by_codes, takes=has_plain_bytes),
    TensorKernel(
        name="int8_linear_of_codes",
        op="linear",
        has_input=True,
        run=quantized_rows_by_codes,
        takes=lambda form: has_plain_bytes(form) and is_per_token(form),
    ),
    TensorKernel(name="linear_of_int4", op="linear", layout="int4_rows", run=int4_rows),
    TensorKernel(name="linear_of_limbs", op="linear", layout="onednn", run=float_rows),
    TensorKernel(
        name="int8_linear_rows",
        op="linear",
        layout="onednn",
        has_input=True,
        run=linear_of_rows,
        takes=is_per_token,
    ),
)
