"""Int8 mixed-precision training: a linear's three products multiply int8, scaled by rows."""

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from pt2e_quant.core.arguments import check_flags
from pt2e_quant.core.errors import UnsupportedError, member_named
from pt2e_quant.core.formats.blocks import block_lengths
from pt2e_quant.core.formats.format_arithmetic import block_amax, scale_of_amax
from pt2e_quant.core.granularity import PerRow
from pt2e_quant.tensors.plan import Filter
from pt2e_quant.training.linear_products import LinearProducts, convert_linears
from pt2e_quant.training.rounding import Rounding, round_to_integers

_LIMIT = 127
_MULTIPLE, _LEAST_ROWS = 8, 32
"""The factor of inner size and columns, and the least rows, of torch's integer kernel on a GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Int8TrainingConfig:
    """Configuration of `convert_to_int8_training`.

    Args:
        rounding: of activations and weights.
        grad_rounding: of gradients. Stochastic keeps what is smaller than a step on average.
        quantize_grad_input: the product for the gradient of the input is in int8 too.
        quantize_grad_weight: likewise that of the weight.
    """

    rounding: Rounding = Rounding.NEAREST
    grad_rounding: Rounding = Rounding.STOCHASTIC
    quantize_grad_input: bool = True
    quantize_grad_weight: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "rounding", member_named(Rounding, self.rounding, "rounding"))
        grad_rounding = member_named(Rounding, self.grad_rounding, "rounding")
        object.__setattr__(self, "grad_rounding", grad_rounding)
        check_flags(self, "quantize_grad_input", "quantize_grad_weight")


def quantize_rows(x: Tensor, axis: int, rounding: Rounding) -> tuple[Tensor, Tensor]:
    """A matrix in int8 with a scale for all elements along an axis.

    Args:
        x: float[M, K].
        axis: the axis that a scale takes in, 0 or -1.
        rounding: how.

    Returns:
        int8[M, K], and float32 scales [M, 1] or [1, K].
    """
    block = block_lengths(PerRow(axis), 2)
    scale = scale_of_amax(block_amax(x, block), _LIMIT, torch.float32)
    steps = round_to_integers(x.to(torch.float32) / scale, rounding)
    return steps.clamp(-_LIMIT, _LIMIT).to(torch.int8), scale


def int8_mm(left: Tensor, right: Tensor) -> Tensor:
    """The exact int32 product of int8[M, K] and int8[K, N]."""
    if left.device.type != "cuda":
        return torch._int_mm(left, right)
    (M, K), N = left.shape, right.shape[1]
    inner, columns = (-(-size // _MULTIPLE) * _MULTIPLE for size in (K, N))
    pad = torch.nn.functional.pad
    left = pad(left, (0, inner - K, 0, max(0, _LEAST_ROWS - M)))
    right = pad(right, (0, columns - N, 0, inner - K))
    return torch._int_mm(left, right)[:M, :N]


@dataclass(frozen=True)
class Int8Products(LinearProducts):
    """The products of a linear in int8."""

    config: Int8TrainingConfig = field(default_factory=Int8TrainingConfig)

    def output(self, x: Tensor, weight: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """See `LinearProducts`; x is kept as it is, because its columns are scaled later."""
        for operand in (x, weight):
            if isinstance(operand, DTensor):
                raise UnsupportedError(
                    "int8 training takes no DTensor: torch has no rule for its integer product",
                    fix="use FSDP2, which hands whole weights to the linear, or float8 training",
                )
        own = self.config.rounding
        return _product(x, weight.t(), own, own, x.dtype), x

    def gradients(
        self,
        grad: Tensor,
        x: Tensor,
        weight: Tensor,
        state: tuple[Tensor, ...],
        needed: tuple[bool, bool],
    ) -> tuple[Tensor | None, Tensor | None]:
        """See `LinearProducts`."""
        own, of_grad = self.config.rounding, self.config.grad_rounding
        dtype = grad.dtype
        dx = dw = None
        if needed[0] and self.config.quantize_grad_input:
            dx = _product(grad, weight, of_grad, own, dtype)
        elif needed[0]:
            dx = grad @ weight.to(dtype)
        if needed[1] and self.config.quantize_grad_weight:
            dw = _product(grad.t(), x, of_grad, own, dtype)
        elif needed[1]:
            dw = grad.t() @ x
        return dx, dw


def _product(
    left: Tensor, right: Tensor, of_left: Rounding, of_right: Rounding, dtype: torch.dtype
) -> Tensor:
    """The product of two matrices in int8, a scale for each row of it and each column."""
    if not left.numel() or not right.numel():
        return left.to(dtype) @ right.to(dtype)  # nothing has no greatest magnitude
    a, a_scale = quantize_rows(left, -1, of_left)
    b, b_scale = quantize_rows(right, 0, of_right)
    return (int8_mm(a.contiguous(), b) * a_scale * b_scale).to(dtype)


def convert_to_int8_training(
    module: nn.Module, config: Int8TrainingConfig | None = None, filter: Filter | None = None
) -> nn.Module:
    """Let the linears of a model train with int8 products, in place; parameters stay as they are.

    Args:
        module: as `linear_products.convert_linears` takes it; what it returns and raises too.
        config: how; `Int8TrainingConfig()` if None.
        filter: likewise.
    """
    products = Int8Products(config or Int8TrainingConfig())
    return convert_linears(module, lambda linear, name: products, filter)
