"""Linears whose three products multiply quantized operands, and how a model gets them."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from pt2e_quant.core.arguments import check_filter, check_initialized, check_module
from pt2e_quant.core.errors import ConfigError, near
from pt2e_quant.tensors.plan import Filter, holds_transposed


class LinearProducts(ABC):
    """The three products of a linear: y = x w', dx = dy w, dw = dy' x."""

    @abstractmethod
    def output(self, x: Tensor, weight: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """The output, and what of x is kept for the gradient of the weight.

        Args:
            x: float[M, K]; every dimension but the last is one by then.
            weight: float[N, K].
            state: `buffers` as they stand; what is seen of x may be noted there.
        """

    @abstractmethod
    def gradients(
        self,
        grad: Tensor,
        x: Tensor,
        weight: Tensor,
        state: tuple[Tensor, ...],
        needed: tuple[bool, bool],
    ) -> tuple[Tensor | None, Tensor | None]:
        """The gradients of input and weight, as far as they are needed.

        Args:
            grad: float[M, N].
            x: what `output` kept.
            weight: float[N, K].
            state: as in `output`.
            needed: whether each of the two is.
        """

    def buffers(self, device: torch.device) -> dict[str, Tensor]:
        """The state of one linear; in this order it is handed to the products."""
        return {}

    def prepare_weight(self, weight: Tensor) -> Tensor:
        """The parameter that a linear has instead of its own; its own if nothing is to change."""
        return weight


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, products: LinearProducts, *state: Tensor
    ) -> Tensor:
        y, kept = products.output(x.reshape(-1, x.shape[-1]), weight, state)
        ctx.products = products
        ctx.shape = x.shape
        ctx.save_for_backward(kept, weight, *state)
        return y.reshape(*x.shape[:-1], y.shape[-1])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, weight, *state = ctx.saved_tensors
        needed = ctx.needs_input_grad[:2]
        grad = grads[0].reshape(-1, grads[0].shape[-1])
        dx, dw = ctx.products.gradients(grad, x, weight, tuple(state), needed)
        dx = None if dx is None else dx.reshape(ctx.shape)
        return (dx, dw, None, *(None for _ in state))


_BY_TEXT: dict[str, LinearProducts] = {}


@torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]  # torch's own
def _multiply(text: str, x: Tensor, weight: Tensor, *state: Tensor) -> Tensor:
    """The product of the products that a text describes, with its gradients.

    torch.compile hands it to autograd untraced: Dynamo cannot trace the making of tensor
    subclasses, autograd's own tracer can. The text is what Dynamo guards on, so that linears of
    other configs do not share a graph.
    """
    y: Tensor = _Linear.apply(x, weight, _BY_TEXT[text], *state)  # type: ignore[no-untyped-call]
    return y


class LowPrecision(nn.Module):
    """A linear that trains with quantized products; its parameters stay as they are."""

    weight: Tensor
    bias: Any  # a tensor or None
    weight_is_transposed = False
    """True if the weight is [in, out]."""

    def take_over(self, linear: nn.Module, products: LinearProducts) -> None:
        """Take the place of a linear, whose parameters are shared."""
        held: nn.Parameter = linear.weight  # type: ignore[assignment]  # every linear has one
        weight = products.prepare_weight(held)
        if weight is not held:
            weight = nn.Parameter(weight, requires_grad=held.requires_grad)
        self.register_parameter("weight", weight)
        self.register_parameter("bias", cast("nn.Parameter | None", linear.bias))
        self.training = linear.training
        self.products = products
        self._state = tuple(products.buffers(held.device))
        for name, buffer in products.buffers(held.device).items():
            self.register_buffer(name, buffer)
        self._text = repr(products)
        _BY_TEXT[self._text] = products

    def forward(self, input: Tensor) -> Tensor:
        """The linear of an input of any dimensions."""
        kind = input.device.type
        if torch.is_autocast_enabled(kind):
            input = input.to(torch.get_autocast_dtype(kind))
        state = [self.get_buffer(name) for name in self._state]
        weight = self.weight.t() if self.weight_is_transposed else self.weight
        y: Tensor = _multiply(self._text, input, weight, *state)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def extra_repr(self) -> str:
        """Shown by print."""
        return f"{super().extra_repr()}, products={self.products}"

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]  # torch's own
        _BY_TEXT[self._text] = self.products  # a process that only loads it


class LowPrecisionLinear(LowPrecision, nn.Linear):
    """An `nn.Linear` that trains with quantized products.

    Args:
        linear: the linear to take the place of.
        products: its products.
    """

    def __init__(self, linear: nn.Linear, products: LinearProducts) -> None:
        has_bias = linear.bias is not None
        super().__init__(linear.in_features, linear.out_features, bias=has_bias, device="meta")
        self.take_over(linear, products)


class LowPrecisionConv1D(LowPrecision):
    """A `Conv1D` of transformers, GPT-2's linear, that trains with quantized products.

    Args:
        linear: the module to take the place of, whose weight is [in, out].
        products: its products.
    """

    weight_is_transposed = True

    def __init__(self, linear: nn.Module, products: LinearProducts) -> None:
        super().__init__()
        self.take_over(linear, products)

    def extra_repr(self) -> str:
        """Shown by print."""
        return f"nf={self.weight.shape[1]}, nx={self.weight.shape[0]}{super().extra_repr()}"


def convert_linears(
    module: nn.Module,
    products: Callable[[nn.Module, str], LinearProducts],
    filter: Filter | None,
) -> nn.Module:
    """Let linears train with quantized products, in place; `Conv1D` of transformers is one.

    Args:
        module: the model, or a linear.
        products: makes those of a linear of a name.
        filter: which linears; all if None.

    Returns:
        The model; of a linear, what takes its place.

    Raises:
        ConfigError: no linear is meant.
    """
    check_module("module", module)
    check_initialized(module)
    check_filter(filter)
    names = {name: part for name, part in module.named_modules() if _is_convertible(part)}
    meant = {n: part for n, part in names.items() if filter is None or filter(part, n)}
    if not meant:
        raise ConfigError(
            "there is no linear to convert" if not names else "the filter leaves no linear",
            fix=f"let the filter take some of the linears; {near('', names)}" if names else None,
        )
    made: dict[nn.Module, LowPrecision] = {}
    for name, part in meant.items():
        if "weight" not in part._parameters:
            raise ConfigError(
                f'the weight of "{name}" is computed from other parameters',
                fix="leave it out by the filter",
            )
        own = products(part, name)
        is_linear = isinstance(part, nn.Linear)
        made[part] = LowPrecisionLinear(part, own) if is_linear else LowPrecisionConv1D(part, own)
    for parent in list(module.modules()):
        # not named_children, which names a shared child once
        for name, child in list(parent._modules.items()):
            if child in made:
                parent.register_module(name, made[child])
    return made.get(module, module)


def _is_convertible(module: nn.Module) -> bool:
    is_done = isinstance(module, LowPrecision)
    return not is_done and (type(module) is nn.Linear or holds_transposed(module))
