"""Linears whose three products multiply quantized operands, and how a model gets them."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from pt2e_quant.core.arguments import check_filter, check_initialized, check_module
from pt2e_quant.core.errors import ConfigError, near

Filter = Callable[[nn.Module, str], bool]
"""Takes a module and its dotted name; returns True to include it."""


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


class LowPrecisionLinear(nn.Linear):
    """A linear that trains with quantized products; its parameters stay as they are.

    Args:
        linear: the linear to take the place of, whose parameters it shares.
        products: its products.
    """

    def __init__(self, linear: nn.Linear, products: LinearProducts) -> None:
        super().__init__(
            linear.in_features, linear.out_features, bias=linear.bias is not None, device="meta"
        )
        weight = products.prepare_weight(linear.weight)
        if weight is not linear.weight:
            weight = nn.Parameter(weight, requires_grad=linear.weight.requires_grad)
        self.weight = weight
        self.bias = linear.bias
        self.training = linear.training
        self.products = products
        self._state = tuple(products.buffers(linear.weight.device))
        for name, buffer in products.buffers(linear.weight.device).items():
            self.register_buffer(name, buffer)
        self._text = repr(products)
        _BY_TEXT[self._text] = products

    def forward(self, input: Tensor) -> Tensor:
        """The linear of an input of any dimensions."""
        kind = input.device.type
        if torch.is_autocast_enabled(kind):
            input = input.to(torch.get_autocast_dtype(kind))
        state = [self.get_buffer(name) for name in self._state]
        y: Tensor = _multiply(self._text, input, self.weight, *state)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def extra_repr(self) -> str:
        """Shown by print."""
        return f"{super().extra_repr()}, products={self.products}"

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]  # torch's own
        _BY_TEXT[self._text] = self.products  # a process that only loads it


def convert_linears(
    module: nn.Module,
    products: Callable[[nn.Linear, str], LinearProducts],
    filter: Filter | None,
) -> nn.Module:
    """Let linears train with quantized products, in place.

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
    names = {name: part for name, part in module.named_modules() if type(part) is nn.Linear}
    meant = {n: part for n, part in names.items() if filter is None or filter(part, n)}
    if not meant:
        raise ConfigError(
            "there is no linear to convert" if not names else "the filter leaves no linear",
            fix=f"let the filter take some of the linears; {near('', names)}" if names else None,
        )
    made: dict[nn.Linear, LowPrecisionLinear] = {}
    for name, part in meant.items():
        if "weight" not in part._parameters:
            raise ConfigError(
                f'the weight of "{name}" is computed from other parameters',
                fix="leave it out by the filter",
            )
        made[part] = LowPrecisionLinear(part, products(part, name))
    for parent in list(module.modules()):
        # not named_children, which names a shared child once
        for name, child in list(parent._modules.items()):
            if child in made:
                parent.register_module(name, made[child])
    return made[module] if isinstance(module, nn.Linear) else module
