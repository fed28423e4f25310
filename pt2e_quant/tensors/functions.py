"""torch functions that have a quantized form, and the canonical operators they are exported as."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from pt2e_quant.core.dtypes import info
from pt2e_quant.core.errors import ConfigError
from pt2e_quant.core.formats import format_ops
from pt2e_quant.core.formats.blocks import block_lengths
from pt2e_quant.core.formats.number_formats import CodeBook
from pt2e_quant.core.granularity import PerTensor, PerToken
from pt2e_quant.core.qdq import (
    ChoosePerTensor,
    ChoosePerTensorSymmetric,
    ChoosePerToken,
    DequantizePerTensorDynamic,
    DequantizePerToken,
    QuantizePerTensorDynamic,
    QuantizePerToken,
)
from pt2e_quant.core.qparams import DEFAULT_EPS
from pt2e_quant.core.schemes import TensorScheme
from pt2e_quant.tensors.aten_ops import rows_of
from pt2e_quant.tensors.kernels.dispatch import REFERENCE, dispatch_range, find_kernel
from pt2e_quant.tensors.kernels.fallbacks import note_fallback
from pt2e_quant.tensors.quantized_tensor import ATEN, FUNCTIONS, QuantizedTensor


def emit_input(x: Tensor, weight: QuantizedTensor) -> Tensor:
    """Activations quantized and dequantized as a weight's form says, by canonical operators."""
    scheme = weight.form.input
    assert scheme is not None  # the caller has looked
    static = {n: getattr(weight, n) for n in weight.part_names if n.startswith("input_")}
    return quantize_activation(x, scheme, **static)


def quantize_activation(
    x: Tensor,
    scheme: TensorScheme,
    input_scale: Tensor | None = None,
    input_zero_point: Tensor | None = None,
) -> Tensor:
    """Activations quantized and dequantized under a scheme.

    Args:
        x: float.
        scheme: dynamic, or static with the scale given.
        input_scale: float32[1] of a static scheme.
        input_zero_point: int32[1] of it.
    """
    is_affine = isinstance(scheme.granularity, PerTensor | PerToken)
    if scheme.format is not None or not is_affine:
        return _quantize_blocks(x, scheme, input_scale)
    low, high = scheme.range
    storage = info(scheme.dtype).storage
    if not scheme.is_dynamic:
        assert input_scale is not None
        assert input_zero_point is not None
        of_all = (input_scale, input_zero_point, low, high, storage)
        codes = QuantizePerTensorDynamic(x, *of_all)
        return DequantizePerTensorDynamic(codes, *of_all)  # type: ignore[no-any-return]
    if isinstance(scheme.granularity, PerToken):
        scale, zero = ChoosePerToken(x, scheme.dtype)
        of_rows = (scale, zero, low, high, scheme.dtype)
        return DequantizePerToken(QuantizePerToken(x, *of_rows), *of_rows, x.dtype)  # type: ignore[no-any-return]
    choose = ChoosePerTensorSymmetric if scheme.symmetric else ChoosePerTensor
    scale, zero = choose(x, low, high, DEFAULT_EPS, scheme.dtype)
    of_all = (scale, zero, low, high, storage)
    return DequantizePerTensorDynamic(QuantizePerTensorDynamic(x, *of_all), *of_all)  # type: ignore[no-any-return]


def _quantize_blocks(x: Tensor, scheme: TensorScheme, static_scale: Tensor | None) -> Tensor:
    """The same with scales in blocks, or with small floats."""
    form, block = scheme.format, list(block_lengths(scheme.granularity, x.dim()))
    if isinstance(form, CodeBook):
        raise ConfigError(f"activations have no code book, found {scheme}")
    limit, dtype = float(scheme.range[1]) if form is None else form.max, scheme.scales.dtype
    whole = None
    if scheme.scales.in_tensor_units:
        of_all = limit * torch.finfo(dtype).max
        whole = format_ops.ChooseScales(x, None, [-1] * x.dim(), of_all, torch.float32)
    scale = static_scale
    if scale is None:
        scale = format_ops.ChooseScales(x, whole, block, limit, dtype)
    scale = scale.reshape((1,) * x.dim()) if static_scale is not None else scale
    out = {} if x.dtype is torch.float32 else {"out_dtype": x.dtype}
    if form is not None:
        codes = format_ops.QuantizeFloat(x, scale, whole, block, form.name)
        return format_ops.DequantizeFloat(codes, scale, whole, block, form.name, **out)  # type: ignore[no-any-return]
    low, high = scheme.range
    limits = (block, low, high, info(scheme.dtype).storage)
    codes = format_ops.QuantizeBlock(x, scale, None, *limits)
    return format_ops.DequantizeBlock(codes, scale, None, *limits, **out)  # type: ignore[no-any-return]


def _in_graph(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A function that a compiler takes as one call and traces with the tensors' parts."""
    return torch.compiler.allow_in_graph(function)  # type: ignore[no-untyped-call, no-any-return]


def real_values(value: Any) -> Any:
    """A quantized tensor's real values; anything else as it is."""
    return value.dequantize() if isinstance(value, QuantizedTensor) else value


@_in_graph
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear` where one of the tensors is quantized."""
    if not isinstance(weight, QuantizedTensor) or not weight.form.is_upright:
        return F.linear(real_values(x), real_values(weight), real_values(bias))
    x, bias = real_values(x), real_values(bias)
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, bias = x.to(dtype), None if bias is None else bias.to(dtype)
    if torch.compiler.is_exporting():
        x = x if weight.form.input is None else emit_input(x, weight)
        return F.linear(x, weight.dequantize(), bias)
    trained = (t for t in (x, weight, bias) if t is not None)
    if torch.is_grad_enabled() and any(t.requires_grad for t in trained):
        made: Tensor
        if torch._C._are_functorch_transforms_active():
            made = _linear_in_functorch(x, weight)
        else:
            made = _Linear.apply(x, weight)  # type: ignore[no-untyped-call]
        return made if bias is None else made + bias
    return run_linear(x, weight, bias)


def run_linear(x: Tensor, weight: QuantizedTensor, bias: Tensor | None) -> Tensor:
    """A linear by the kernel that the table has for it, else by the reference."""
    form = weight.form
    kernel = find_kernel("linear", form, x.device.type, x.dtype)
    with dispatch_range("linear", form, REFERENCE if kernel is None else kernel.name):
        if kernel is not None:
            return kernel.run(x, weight, bias)
        if form.input is not None:
            x = emit_input(x, weight)
        return F.linear(x, weight.dequantize().to(x.dtype), bias)


def _linear_in_functorch(x: Tensor, weight: QuantizedTensor) -> Tensor:
    """A linear on real values: `torch.func` hands functions no tensors of subclasses."""
    note_fallback("linear", "torch.func differentiates on real values")
    if weight.form.input is not None:
        x = x + (emit_input(x, weight) - x).detach()  # rounding passes the gradient through
    return F.linear(x, weight.dequantize().to(x.dtype))


class _Linear(torch.autograd.Function):
    """A linear by any kernel. Gradients are those of the product with the real values."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: QuantizedTensor) -> Tensor:
        """The product; codes are kept for the backward pass, no real values.

        Of a weight that does not train the parts are kept, not the tensor: `Module.to` replaces
        such tensors, which torch refuses while a graph refers to them.
        """
        is_trained = weight.requires_grad
        ctx.save_for_backward(*((x, weight) if is_trained else ()))
        ctx.held = None if is_trained else (weight.parts, weight.form)
        return run_linear(x, weight, None)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Return the gradients of x and, where it is asked for, of the weight."""
        if ctx.held is None:
            x, weight = ctx.saved_tensors
        else:
            x, weight = None, QuantizedTensor(*ctx.held)
        of_x = of_weight = None
        if ctx.needs_input_grad[0]:
            of_x = grad @ weight.dequantize().to(grad.dtype)
        if ctx.needs_input_grad[1]:
            rows = grad.reshape(-1, grad.shape[-1])
            of_weight = (rows.t() @ x.reshape(-1, x.shape[-1])).to(weight.dtype)
        return of_x, of_weight


@_in_graph
def matmul(a: Tensor, b: Tensor) -> Tensor:
    """A product; of a transposed weight it is a linear."""
    if isinstance(b, QuantizedTensor) and b.form.axes == (1, 0):
        return linear(a, b.t())
    note_fallback("matmul", "only products with a transposed matrix have a quantized form")
    return torch.matmul(real_values(a), real_values(b))


@_in_graph
def addmm(
    input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1
) -> Tensor:
    """`torch.addmm`; with a transposed weight, and a bias for its rows, it is a linear."""
    if isinstance(mat2, QuantizedTensor) and mat2.form.axes == (1, 0):
        if input.dim() == 1 and beta == 1 and alpha == 1:
            return linear(mat1, mat2.t(), input)
    note_fallback("addmm", "only products with a transposed matrix have a quantized form")
    real = [real_values(x) for x in (input, mat1, mat2)]
    return torch.addmm(*real, beta=beta, alpha=alpha)


@_in_graph
def embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """`F.embedding` of a quantized table: rows of codes are gathered, then dequantized."""
    assert isinstance(weight, QuantizedTensor)  # torch calls it for one; places are integers
    trains = torch.is_grad_enabled() and weight.requires_grad
    if trains or max_norm is not None or torch.compiler.is_exporting():
        table = real_values(weight)
        return F.embedding(
            input, table, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse
        )
    form = weight.form
    kernel = find_kernel("embedding", form, weight.device.type, weight.dtype)
    with dispatch_range("embedding", form, "gather" if kernel is None else kernel.name):
        return rows_of(weight, input) if kernel is None else kernel.run(weight, input)


def _on_real_weight(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A convolution on the weight's real values, and on quantized activations if its form says."""

    @_in_graph
    def run(
        input: Tensor, weight: Tensor, bias: Tensor | None = None, *args: Any, **kwargs: Any
    ) -> Tensor:
        x = real_values(input)
        if not isinstance(weight, QuantizedTensor):
            return function(x, weight, real_values(bias), *args, **kwargs)
        form = weight.form
        if form.input is not None:
            x = emit_input(x, weight)
        with dispatch_range("conv", form, REFERENCE):
            real = real_values(weight)
            if not torch.is_autocast_enabled(x.device.type):
                real = real.to(x.dtype)
            return function(x, real, real_values(bias), *args, **kwargs)

    return run


def _product_below(func: Any, args: Any, kwargs: Any) -> Any:
    """`addmm` and `mm` with a transposed weight: linears of functions that hide their own calls.

    `F.multi_head_attention_forward` is one; gradients are above this.
    """
    *bias, x, weight = args
    is_linear = isinstance(weight, QuantizedTensor) and weight.form.axes == (1, 0)
    if kwargs or not is_linear or isinstance(x, QuantizedTensor):
        return NotImplemented
    return run_linear(x, weight.t(), bias[0] if bias else None)


def _numpy(tensor: QuantizedTensor, *args: Any, **kwargs: Any) -> Any:
    """The real values as an array; torch has none of subclasses."""
    note_fallback("numpy", "arrays hold real values")
    return real_values(tensor).numpy(*args, **kwargs)


def _array(tensor: QuantizedTensor, dtype: Any = None, copy: bool | None = None) -> Any:
    """`numpy.asarray` of a quantized tensor; the array is new in any case."""
    found = _numpy(tensor)
    return found if dtype is None else found.astype(dtype, copy=False)


def _tolist(tensor: QuantizedTensor) -> Any:
    """The real values as a list; torch has none of subclasses."""
    note_fallback("tolist", "lists hold real values")
    return real_values(tensor).tolist()


def _share_memory(tensor: QuantizedTensor) -> QuantizedTensor:
    """Move the parts to memory that processes share; the tensor itself has no storage."""
    for part in tensor.parts.values():
        if not part.is_mkldnn:  # a process packs its own
            part.share_memory_()  # type: ignore[no-untyped-call]  # torch's
    return tensor


def _is_shared(tensor: QuantizedTensor) -> bool:
    own = (part for part in tensor.parts.values() if not part.is_mkldnn)
    return all(part.is_shared() for part in own)  # type: ignore[no-untyped-call]  # torch's


ATEN[torch.ops.aten.addmm.default] = _product_below
ATEN[torch.ops.aten.mm.default] = _product_below
FUNCTIONS[F.linear] = linear
FUNCTIONS[F.embedding] = embedding
FUNCTIONS[torch.addmm] = addmm
FUNCTIONS[Tensor.addmm] = addmm
FUNCTIONS[Tensor.numpy] = _numpy
FUNCTIONS[Tensor.__array__] = _array
FUNCTIONS[Tensor.tolist] = _tolist
FUNCTIONS[Tensor.share_memory_] = _share_memory
FUNCTIONS[Tensor.is_shared] = _is_shared
for _product in (torch.matmul, torch.mm, Tensor.matmul, Tensor.mm, Tensor.__matmul__):
    FUNCTIONS[_product] = matmul
for _convolution in (
    F.conv1d,
    F.conv2d,
    F.conv3d,
    F.conv_transpose1d,
    F.conv_transpose2d,
    F.conv_transpose3d,
):
    FUNCTIONS[_convolution] = _on_real_weight(_convolution)
