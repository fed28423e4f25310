"""Try products in this process, and the loop of the child that tries them for another."""

import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from pt2e_quant.core.integer_ops.calls import compute
from pt2e_quant.core.integer_ops.products import Window, convolve, multiply_rows
from pt2e_quant.core.pair_sums import fitted
from pt2e_quant.kernels.int8_linear.multiply_cpu import int_mm_is_exact
from pt2e_quant.kernels.onednn.exact_products import onednn_is_exact
from pt2e_quant.kernels.onednn.operators import (
    ConvSum,
    LinearSum,
    PackConv,
    PackLinear,
    QConv,
    QLinear,
    QLinearSum,
    in_image_format,
)
from pt2e_quant.kernels.product_trial.product import Operator, Product, read_product
from pt2e_quant.kernels.product_trial.run_in_child import TIME_COMMAND
from pt2e_quant.kernels.product_trial.time_product import time_product

RIGHT = ""
"""The result of `try_product` for a correct product."""

_SPREAD = 8.0
"""Real values before the activation function reach to this: through all pieces of it."""
_STEPS = 200
"""Steps of a uint8 result for the real values; the rest of 256 is for a zero_point."""
_ZERO_POINT = 29
_TOLERANCE = 1e-4
"""Relative to the largest value: oneDNN approximates exponentials, torch's sums round otherwise."""
_ROWS = 64
"""At each end of a product's rows, so many are compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Drawn:
    """Operands of a product, and what oneDNN is told of them."""

    x: Tensor
    weight: Tensor
    x_scale: float
    x_zero_point: int
    weight_scale: Tensor
    bias: Tensor | None
    summand: Tensor | None
    summand_scale: float
    summand_zero_point: int


def try_product(product: Product, threads: tuple[int, ...] = (1,)) -> str:
    """`RIGHT`, or what is wrong with a product here.

    Args:
        product: what to try.
        threads: numbers of torch's threads to run it with, each once.
    """
    if product.is_empty:
        return RIGHT
    before = torch.get_num_threads()
    try:
        with torch.no_grad():
            return _try(product, threads)
    finally:
        torch.set_num_threads(before)


def _try(product: Product, threads: tuple[int, ...]) -> str:
    generator = torch.Generator().manual_seed(0)
    if product.operator is Operator.INT_MM:
        return _try_int_mm(product, generator, threads)
    drawn = _draw(product, generator)
    at = _places(product)
    real = _real(product, drawn, at)
    scale, zero_point = _result_qparams(product, real)
    expected = real if scale is None else (real / scale).round().add(zero_point).clamp(0, 255)
    allowed = 1.0 if scale is not None else _TOLERANCE * max(1.0, float(real.abs().max()))
    for number in threads:
        torch.set_num_threads(number)
        for run in _runs(product):
            try:
                made = run(product, drawn, scale or 1.0, zero_point)
            except RuntimeError as error:
                return f"oneDNN refuses it ({str(error).splitlines()[0]})"
            found = made.index_select(0, at) if product.operator is Operator.CONV else _rows(made)
            if found.shape != expected.shape:
                return f"oneDNN gives {list(found.shape)}, {list(expected.shape)} are right"
            wrong = ~((found.double() - expected).abs() <= allowed)
            if bool(wrong.any()):
                return f"oneDNN gives wrong results here ({_percent(wrong)} of them)"
    return RIGHT


def _percent(wrong: Tensor) -> str:
    share = 100.0 * float(wrong.double().mean())
    return f"{share:.0f} %" if share >= 1 else "less than 1 %"


def _integers(shape: tuple[int, ...], low: int, high: int, generator: torch.Generator) -> Tensor:
    """Uniform integers, every second one an extreme."""
    drawn = torch.randint(low, high + 1, shape, generator=generator)
    kind = torch.randint(0, 4, shape, generator=generator)
    return torch.where(kind == 0, low, torch.where(kind == 1, high, drawn))


def _draw(product: Product, generator: torch.Generator) -> _Drawn:
    high = 255
    x = _integers(product.x, 0, high, generator).to(torch.uint8)
    weight = _integers(product.weight, -128, 127, generator).to(torch.int8)
    if not onednn_is_exact():  # lowering takes such weights alone, or activations of 7 bits
        weight = fitted(weight)
    terms = math.prod(product.weight[1:])
    # Powers of two, so that the products of scales and sums are exact.
    x_scale = 2.0 ** round(math.log2(_SPREAD / (high * 90 * math.sqrt(terms))))
    count = product.weight[0]
    weight_scale = torch.tensor([1.0, 0.5, 0.25]).repeat(count // 3 + 1)[:count].contiguous()
    bias = torch.randn(count, generator=generator) if product.has_bias else None
    summand, summand_scale = None, 1.0
    if product.summand:
        shape = _result_shape(product)
        summand = torch.randn(shape, generator=generator)
        if product.summand == "uint8":
            summand, summand_scale = _integers(shape, 0, high, generator).to(torch.uint8), 2.0**-5
        if product.operator is Operator.CONV:
            summand = in_image_format(summand)
    return _Drawn(
        x=in_image_format(x) if product.operator is Operator.CONV else x,
        weight=weight,
        x_scale=x_scale,
        x_zero_point=_ZERO_POINT if product.is_shifted else 0,
        weight_scale=weight_scale,
        bias=bias,
        summand=summand,
        summand_scale=summand_scale,
        summand_zero_point=_ZERO_POINT if product.is_summand_shifted else 0,
    )


def _result_shape(product: Product) -> tuple[int, ...]:
    if product.operator is Operator.LINEAR:
        return (*product.x[:-1], product.weight[0])
    kernels = zip(
        product.x[2:],
        product.weight[2:],
        product.stride,
        product.padding,
        product.dilation,
        strict=True,
    )
    sizes = (
        (size + 2 * pad - gap * (kernel - 1) - 1) // step + 1
        for size, kernel, step, pad, gap in kernels
    )
    return (product.x[0], product.weight[0], *sizes)


def _places(product: Product) -> Tensor:
    """The images of a convolution that are compared: the first and the last."""
    return torch.tensor(sorted({0, product.x[0] - 1}))


def _rows(value: Tensor) -> Tensor:
    """The rows of a linear's operand or result that are compared, in two dimensions."""
    flat = value.reshape(-1, value.shape[-1])
    return flat if len(flat) <= 2 * _ROWS else torch.cat([flat[:_ROWS], flat[-_ROWS:]])


def _real(product: Product, drawn: _Drawn, at: Tensor) -> Tensor:
    """The exact real results at the places that are compared, as float64."""
    storages: dict[str, Any] = {
        "x_zero_point": drawn.x_zero_point,
        "weight_zero_point": 0,
        "x_storage": torch.uint8,
        "weight_storage": torch.int8,
    }
    summand, rows = drawn.summand, drawn.x
    if product.operator is Operator.LINEAR:
        rows = _rows(rows)
        total = multiply_rows(compute, rows, drawn.weight, None, **storages)
        summand = None if summand is None else _rows(summand)
        ends: tuple[int, ...] = (-1,)
    else:
        rows = rows.index_select(0, at).contiguous()
        total = convolve(compute, rows, drawn.weight, None, _window(product), **storages)
        summand = None if summand is None else summand.index_select(0, at)
        ends = (-1, *(1 for _ in product.stride))
    real = total.double() * (drawn.weight_scale.double() * drawn.x_scale).reshape(ends)
    if drawn.bias is not None:
        real = real + drawn.bias.double().reshape(ends)
    if summand is not None:
        real = real + (summand.double() - drawn.summand_zero_point) * drawn.summand_scale
    return _POST_OPS[product.post_op.name](real, product)


def _window(product: Product) -> Window:
    return Window(
        stride=product.stride,
        padding=product.padding,
        dilation=product.dilation,
        groups=product.groups,
    )


def _result_qparams(product: Product, real: Tensor) -> tuple[float | None, int]:
    if product.result != "uint8":
        return None, 0
    low = min(0.0, float(real.min())) if product.is_result_shifted else 0.0
    scale = max(float(real.max()) - low, 1.0) / _STEPS
    return scale, min(255, 1 + round(-low / scale)) if product.is_result_shifted else 0


def _clip_bounds(product: Product) -> tuple[float, float]:
    reals = {"-inf": -math.inf, "-": -1.0, "0": 0.0, "+": 2.0, "inf": math.inf}
    low, high = (reals[bound] for bound in product.post_op.bounds)
    return low, high


_POST_OPS: dict[str, Callable[[Tensor, Product], Tensor]] = {
    "none": lambda x, product: x,
    "relu": lambda x, product: x.relu(),
    "hardtanh": lambda x, product: x.clamp(*_clip_bounds(product)),
    "hardswish": lambda x, product: F.hardswish(x),
    "swish": lambda x, product: F.silu(x),
    "gelu": lambda x, product: F.gelu(x, approximate=product.post_op.algorithm),
    "leaky_relu": lambda x, product: F.leaky_relu(x, 0.1),
    "tanh": lambda x, product: x.tanh(),
}


def _unary(product: Product) -> tuple[str, list[float], str]:
    numbers = {"hardtanh": lambda: [*_clip_bounds(product)], "leaky_relu": lambda: [0.1]}
    name = product.post_op.name
    return name, numbers.get(name, lambda: [0.0])(), product.post_op.algorithm


_Run = Callable[[Product, _Drawn, float, int], Tensor]


def _runs(product: Product) -> Iterator[_Run]:
    """The calls that a program may make of a product."""
    if product.operator is Operator.CONV:
        yield _run_conv
        return
    yield _run_linear
    if product.summand:
        yield _run_linear_in_place


def _run_conv(product: Product, drawn: _Drawn, scale: float, zero_point: int) -> Tensor:
    geometry = ([*product.stride], [*product.padding], [*product.dilation], product.groups)
    x = drawn.x, drawn.x_scale, drawn.x_zero_point
    shape = [*product.x] if product.is_packed_for_x else None
    packed = PackConv(drawn.weight, drawn.weight_scale, *x[1:], *geometry, shape)
    zeros = torch.zeros(len(drawn.weight), dtype=torch.int32)
    head = (*x, packed, drawn.weight_scale, zeros)
    ending = (scale, zero_point, getattr(torch, product.result))
    unary = _unary(product)
    if drawn.summand is None:
        made: Tensor = QConv(*head, drawn.bias, *geometry, *ending, *unary)
        return made
    added = drawn.summand_scale, drawn.summand_zero_point
    summed: Tensor = ConvSum(
        *head, drawn.summand, drawn.bias, *geometry, *ending, *added, "sum", 1.0, *unary
    )
    return summed


def _run_linear(product: Product, drawn: _Drawn, scale: float, zero_point: int) -> Tensor:
    head, ending = _linear_operands(product, drawn, scale, zero_point)
    if drawn.summand is None:
        made: Tensor = QLinear(*head, drawn.bias, *ending, *_unary(product))
        return made
    added = drawn.summand_scale, drawn.summand_zero_point, "add", 1.0
    summed: Tensor = LinearSum(*head, drawn.summand, drawn.bias, *ending, *added, *_unary(product))
    return summed


def _run_linear_in_place(product: Product, drawn: _Drawn, scale: float, zero_point: int) -> Tensor:
    if product.summand != product.result:
        return _run_linear(product, drawn, scale, zero_point)
    head, ending = _linear_operands(product, drawn, scale, zero_point)
    assert drawn.summand is not None
    added = drawn.summand_scale, drawn.summand_zero_point, "sum", 1.0
    made: Tensor = QLinearSum(
        *head, drawn.summand.clone(), drawn.bias, *ending, *added, *_unary(product)
    )
    return made


def _linear_operands(
    product: Product, drawn: _Drawn, scale: float, zero_point: int
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    shape = [*product.x] if product.is_packed_for_x else None
    zeros = torch.zeros(len(drawn.weight), dtype=torch.int32)
    packed = PackLinear(drawn.weight, shape)
    x = drawn.x, drawn.x_scale, drawn.x_zero_point
    head = (*x, packed, drawn.weight_scale, zeros)
    return head, (scale, zero_point, getattr(torch, product.result))


def _try_int_mm(product: Product, generator: torch.Generator, threads: tuple[int, ...]) -> str:
    if not int_mm_is_exact():
        return RIGHT  # the definition runs in its place
    x = _integers(product.x, -128, 127, generator).to(torch.int8)
    weight = _integers(product.weight, -128, 127, generator).to(torch.int8)
    kinds: dict[str, Any] = {
        "x_zero_point": 0,
        "weight_zero_point": 0,
        "x_storage": torch.int8,
        "weight_storage": torch.int8,
    }
    expected = multiply_rows(compute, _rows(x), weight, None, **kinds)
    for number in threads:
        torch.set_num_threads(number)
        wrong = _rows(torch._int_mm(x, weight.t())) != expected
        if bool(wrong.any()):
            return f"torch._int_mm gives wrong results here ({_percent(wrong)} of them)"
    return RIGHT


def run_here(products: Iterable[Product], *, command: Sequence[str]) -> Mapping[Product, str]:
    """Do as `run_in_child` without a child process: each product is tried on one thread.

    A product that hangs or crashes takes this process with it: `run_in_child` survives those.
    """
    if tuple(command) == TIME_COMMAND:
        return {product: time_product(product).text for product in products}
    return {product: try_product(product) for product in products}


def serve() -> None:
    """Try the products on standard input, a key a line; report each before and behind it.

    Each is run on one thread and on all of the machine's: oneDNN may divide the work among kernels.
    """
    threads = tuple(sorted({1, os.cpu_count() or 1}))
    _report(lambda product: try_product(product, threads))


def serve_times() -> None:
    """Time the products on standard input, in place of trying them."""
    _report(lambda product: time_product(product).text)


def _report(answer: Callable[[Product], str]) -> None:
    for index, line in enumerate(sys.stdin):
        print(json.dumps({"start": index}), flush=True)
        reason = answer(read_product(line))
        print(json.dumps({"end": index, "reason": reason}), flush=True)
