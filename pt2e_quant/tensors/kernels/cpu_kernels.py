"""Kernels for quantized tensors on CPUs: entries of the dispatch table."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from pt2e_quant.core.granularity import PerToken
from pt2e_quant.kernels.int4_linear.few_rows_op import LinearOfInt4
from pt2e_quant.kernels.int8_linear.rows_op import linear_of_quantized_rows
from pt2e_quant.kernels.onednn.limbs_op import linear_of_limbs_at_once
from pt2e_quant.tensors.form import TensorForm
from pt2e_quant.tensors.kernels.kernel import TensorKernel
from pt2e_quant.tensors.quantized_tensor import QuantizedTensor

_LIBRARY = torch.library.Library("pt2e_quant", "FRAGMENT")  # type: ignore[no-untyped-call]  # torch's own


@cache
def _zeros(count: int) -> Tensor:
    return torch.zeros(count, dtype=torch.int32)


def _of_limbs(x: Tensor, packed: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    return linear_of_limbs_at_once(x, packed, scale, _zeros(scale.shape[0]), bias)


def _fake_product(x: Tensor, packed: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    return x.new_empty((*x.shape[:-1], scale.shape[0]))


def _define(name: str, run: Callable[..., Tensor]) -> Any:
    """An operator of (x, packed, scale, bias): compilers call it as it is.

    Explicit, because Inductor's own form of oneDNN's product takes constant weights alone.
    """
    schema = f"{name}(Tensor x, Tensor packed, Tensor scale, Tensor? bias=None) -> Tensor"
    _LIBRARY.define(schema)  # type: ignore[no-untyped-call]
    torch.library.impl(_LIBRARY, name, "CompositeExplicitAutograd")(run)
    torch.library.register_fake(f"pt2e_quant::{name}", lib=_LIBRARY)(_fake_product)
    return getattr(torch.ops.pt2e_quant, name).default


_LinearOfLimbs = _define("tensor_linear_of_limbs", _of_limbs)
_LinearOfRows = _define("tensor_linear_of_rows", linear_of_quantized_rows)


def float_rows(x: Tensor, weight: QuantizedTensor, bias: Tensor | None) -> Tensor:
    """Float rows by an int8 weight, as two limbs of 8 bits."""
    p = weight.parts
    made: Tensor = _LinearOfLimbs(x, p["packed"], p["row_scale"], bias)
    return made


def linear_of_rows(x: Tensor, weight: QuantizedTensor, bias: Tensor | None) -> Tensor:
    """Rows quantized to int8 at run time by an int8 weight."""
    p = weight.parts
    made: Tensor = _LinearOfRows(x, p["packed"], p["row_scale"], bias)
    return made


def is_per_token(form: TensorForm) -> bool:
    """Whether activations are what `QuantizeRows` gives."""
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


CPU_KERNELS = (
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
