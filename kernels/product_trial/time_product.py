"""The time of one product here in integers, and in float as torch runs it without a compiler."""

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from pt2e_quant.kernels.onednn.operators import (
    PackConv,
    PackLinear,
    QConv,
    QLinear,
    in_image_format,
)
from pt2e_quant.kernels.product_trial.product import Operator, Product

_ENOUGH_S = 0.1
"""Each product is timed for about so long."""
_LEAST_ROUNDS = 3
_MOST_ROUNDS = 20
_CACHE_BYTES = 8 << 20
"""Written between calls: in a model each call finds other operators' data in the caches."""
_SCALE, _ZERO_POINT = 0.02, 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """The least CPU time of a call, in microseconds, on one thread.

    Args:
        integer_us: of the fused product of uint8 activations, to uint8.
        float_us: of torch's float operators: the product and the function behind it.
        quantize_us: of quantizing its activations.
    """

    integer_us: float
    float_us: float
    quantize_us: float

    @property
    def text(self) -> str:
        """The text that `read_times` reads."""
        return json.dumps(asdict(self))


def read_times(text: str) -> Times | None:
    """The times in a text; None of what says why there are none."""
    try:
        return Times(**json.loads(text))
    except (ValueError, TypeError):
        return None


def time_product(product: Product) -> Times:
    """Time a product's integer and float forms in turn, so that both see the same machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.no_grad():
            return _time(product)
    finally:
        torch.set_num_threads(before)


def _time(product: Product) -> Times:
    x = torch.randn(product.x)
    is_image = product.operator is Operator.CONV
    calls: tuple[Callable[[], Tensor], ...] = (
        _in_integers(product),
        _in_float(product, x),
        lambda: in_image_format(_quantized(x)) if is_image else _quantized(x),
    )
    cached = torch.zeros(_CACHE_BYTES, dtype=torch.uint8)
    least = [float("inf")] * len(calls)
    end = time.perf_counter() + _ENOUGH_S
    for done in range(_MOST_ROUNDS):
        if done >= _LEAST_ROUNDS and time.perf_counter() > end:
            break
        for i, call in enumerate(calls):
            cached.add_(1)
            start = time.thread_time()
            call()
            least[i] = min(least[i], time.thread_time() - start)
    integer, real, quantize = (1e6 * seconds for seconds in least)
    return Times(integer_us=integer, float_us=real, quantize_us=quantize)


def _quantized(x: Tensor) -> Tensor:
    held = torch.quantize_per_tensor(x, _SCALE, _ZERO_POINT, torch.quint8)
    integers = torch.empty(0, dtype=torch.uint8)
    return integers.set_(held.untyped_storage(), held.storage_offset(), held.shape, held.stride())


def _in_integers(product: Product) -> Callable[[], Tensor]:
    count = product.weight[0]
    weight = torch.randint(-127, 128, product.weight, dtype=torch.int8)
    scale, zeros = torch.full((count,), 0.01), torch.zeros(count, dtype=torch.int32)
    bias = torch.randn(count) if product.has_bias else None
    x = torch.randint(0, 256, product.x, dtype=torch.uint8)
    is_plain = product.post_op.name == "none" or len(product.stride) == 3  # volumes have none
    name = "none" if is_plain else "relu"
    ending = (0.05, 0, torch.uint8, name, [0.0], "")
    if product.operator is Operator.LINEAR:
        packed = PackLinear(weight, [*product.x])
        head: tuple[Any, ...] = (x, _SCALE, _ZERO_POINT, packed, scale, zeros, bias)
        return lambda: QLinear(*head, *ending)
    geometry = ([*product.stride], [*product.padding], [*product.dilation], product.groups)
    packed = PackConv(weight, scale, _SCALE, _ZERO_POINT, *geometry, [*product.x])
    head = (in_image_format(x), _SCALE, _ZERO_POINT, packed, scale, zeros, bias)
    return lambda: QConv(*head, *geometry, *ending)


_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
    "hardswish": F.hardswish,
    "swish": F.silu,
    "gelu": F.gelu,
    "tanh": torch.tanh,
}


def _in_float(product: Product, x: Tensor) -> Callable[[], Tensor]:
    weight, count = torch.randn(product.weight), product.weight[0]
    bias = torch.randn(count) if product.has_bias else None
    function = _FUNCTIONS.get(product.post_op.name, torch.relu)
    if product.operator is Operator.LINEAR:
        return lambda: function(F.linear(x, weight, bias))
    geometry = ([*product.stride], [*product.padding], [*product.dilation], product.groups)
    convolve = (F.conv1d, F.conv2d, F.conv3d)[len(product.stride) - 1]
    return lambda: function(convolve(x, weight, bias, *geometry))
