"""AdamW and SGD with states of 8 or 4 bits."""

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable
from numbers import Real
from typing import Any, ClassVar, final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, ParamsT

from pt2e_quant.core.arguments import check_number, found_text
from pt2e_quant.core.errors import ConfigError, UnsupportedError, member_named, near
from pt2e_quant.training.optimizers.states import (
    StateFormat,
    block_for,
    decode_state,
    encode_state,
    like_param,
    load_exactly,
    positive_format,
    signed_format,
)
from pt2e_quant.training.rounding import Rounding, to_bfloat16

_WAYS = ("foreach", "fused", "capturable", "differentiable")
"""Options of torch's optimizers that say how a step is computed."""


class LowBitOptimizer(Optimizer):
    """An optimizer whose states lie in codes between steps, `NAME_codes` and `NAME_scale`."""

    bits: ClassVar[int]

    def __init__(self, params: ParamsT, options: dict[str, Any]) -> None:
        if isinstance(params, nn.Module) or not isinstance(params, Iterable):
            raise ConfigError(
                f"params are parameters or groups of them, found {found_text(params)}",
                fix=f"{type(self).__name__}(model.parameters())",
            )
        super().__init__(params, options)

    @abstractmethod
    def updated(
        self, values: Tensor, grad: Tensor, states: "States", group: dict[str, Any]
    ) -> Tensor:
        """The values of a parameter after a step.

        Args:
            values: float32.
            grad: float32.
            states: those of the parameter.
            group: the options of its group.
        """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step for every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, group)
        return loss

    def _update(self, param: Tensor, group: dict[str, Any]) -> None:
        grad = param.grad
        assert grad is not None
        if grad.is_sparse:
            raise UnsupportedError(
                f"{type(self).__name__} takes no sparse gradients",
                fix="make the embedding with sparse=False",
            )
        if grad.dtype == torch.float16 or grad.is_complex():
            raise UnsupportedError(f"{type(self).__name__} takes no gradients of {grad.dtype}")
        local, own = local_of(param), local_of(grad)
        values = local.to(torch.float32)
        sign = -1.0 if group["maximize"] else 1.0
        found = self.updated(
            values, own.to(torch.float32) * sign, States(self.state[param], param), group
        )
        if local.dtype == torch.bfloat16:
            found = to_bfloat16(found, Rounding(group["rounding"]))
        local.copy_(found)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state dict; codes stay codes and scales float32."""
        super().load_state_dict(state_dict)
        load_exactly(self, state_dict)


class States:
    """The states of one parameter, in the dict that the optimizer keeps for it."""

    def __init__(self, kept: dict[str, Any], param: Tensor) -> None:
        self.kept = kept
        self.param = param
        self.shape = local_of(param).shape

    def next_step(self) -> int:
        """Count a step; the first is 1."""
        if "step" not in self.kept:
            self.kept["step"] = torch.tensor(0.0)
        self.kept["step"] += 1
        return int(self.kept["step"].item())

    def read(self, name: str, form: StateFormat) -> Tensor | None:
        """The values of a state, float32; None before the first step."""
        if name in self.kept:
            return local_of(self.kept[name])
        if f"{name}_codes" not in self.kept:
            return None
        codes, scale = (local_of(self.kept[f"{name}_{part}"]) for part in ("codes", "scale"))
        return decode_state(codes, scale, self.shape, form, self._block(form))

    def write(self, name: str, values: Tensor, form: StateFormat) -> None:
        """Keep a state."""
        if block_for(self.param, form) is None:
            self.kept[name] = like_param(values, self.param)
            return
        parts = encode_state(values, form, self._block(form))
        for part, value in zip(("codes", "scale"), parts, strict=True):
            self.kept[f"{name}_{part}"] = like_param(value, self.param)

    def _block(self, form: StateFormat) -> int:
        block = block_for(self.param, form)
        assert block is not None
        return block


def local_of(x: Tensor) -> Tensor:
    """The shard of a DTensor; any other tensor itself."""
    return x._local_tensor if isinstance(x, DTensor) else x


class LowBitAdamW(LowBitOptimizer):
    """AdamW (Loshchilov and Hutter, arXiv:1711.05101) with states of few bits.

    Args:
        params: parameters, or groups of them.
        lr: the step size.
        betas: how much of each moment stays.
        eps: added to the square root of the second moment.
        weight_decay: the part of each value that is lost in a step, in units of lr.
        amsgrad: must be False.
        maximize: climb instead.
        rounding: of bfloat16 parameters, "nearest" or "stochastic".
        of_torch: torch's foreach, fused, capturable and differentiable, which must be off.

    Raises:
        ConfigError: an option has a value that it cannot have, or there is no such option.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        rounding: str = "nearest",
        **of_torch: object,
    ) -> None:
        _check_ways(**of_torch)
        if amsgrad:
            raise ConfigError("AdamW of few bits keeps no third state", fix="amsgrad=False")
        _check_at_least_0(lr=lr, eps=eps, weight_decay=weight_decay)
        _check_betas(betas)
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        more = {
            "maximize": maximize,
            "rounding": member_named(Rounding, rounding, "rounding").value,
        }
        super().__init__(params, options | more)

    def updated(
        self, values: Tensor, grad: Tensor, states: States, group: dict[str, Any]
    ) -> Tensor:
        """See `LowBitOptimizer`."""
        beta1, beta2 = group["betas"]
        lr, step = float(group["lr"]), states.next_step()
        forms = signed_format(self.bits), positive_format(self.bits)
        first, second = states.read("exp_avg", forms[0]), states.read("exp_avg_sq", forms[1])
        first = torch.zeros_like(values) if first is None else first
        second = torch.zeros_like(values) if second is None else second
        first = first.lerp(grad, 1 - beta1)
        second = second * beta2 + grad.square() * (1 - beta2)
        states.write("exp_avg", first, forms[0])
        states.write("exp_avg_sq", second, forms[1])
        size = (second / (1 - beta2**step)).sqrt() + group["eps"]
        values = values * (1 - lr * group["weight_decay"])
        return values.addcdiv(first, size, value=-lr / (1 - beta1**step))


@final
class AdamW8bit(LowBitAdamW):
    """AdamW with states of 8 bits, in blocks of 256: see `LowBitAdamW`."""

    bits = 8


@final
class AdamW4bit(LowBitAdamW):
    """AdamW with states of 4 bits, in blocks of 128: see `LowBitAdamW`."""

    bits = 4


class LowBitSGD(LowBitOptimizer):
    """SGD with a momentum of few bits, and the arithmetic of `torch.optim.SGD`.

    Args:
        params: parameters, or groups of them.
        lr: the step size.
        momentum: how much of the momentum stays.
        dampening: the part of the gradient that does not enter it.
        weight_decay: added to the gradient, in units of the values.
        nesterov: look ahead by the momentum.
        maximize: climb instead.
        rounding: of bfloat16 parameters, "nearest" or "stochastic".
        of_torch: torch's foreach, fused, capturable and differentiable, which must be off.

    Raises:
        ConfigError: an option has a value that it cannot have, or there is no such option.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        rounding: str = "nearest",
        **of_torch: object,
    ) -> None:
        _check_ways(**of_torch)
        _check_at_least_0(lr=lr, momentum=momentum, weight_decay=weight_decay)
        check_number("dampening", dampening, least=-math.inf)
        if nesterov and (momentum <= 0 or dampening != 0):
            raise ConfigError("nesterov needs a momentum and no dampening")
        options = {"lr": lr, "momentum": momentum, "dampening": dampening}
        options |= {"weight_decay": weight_decay, "nesterov": nesterov, "maximize": maximize}
        super().__init__(
            params, options | {"rounding": member_named(Rounding, rounding, "rounding").value}
        )

    def updated(
        self, values: Tensor, grad: Tensor, states: States, group: dict[str, Any]
    ) -> Tensor:
        """See `LowBitOptimizer`."""
        grad = grad + values * group["weight_decay"] if group["weight_decay"] else grad
        if momentum := group["momentum"]:
            form = signed_format(self.bits)
            kept = states.read("momentum_buffer", form)
            moved = grad if kept is None else kept * momentum + grad * (1 - group["dampening"])
            states.write("momentum_buffer", moved, form)
            grad = grad + moved * momentum if group["nesterov"] else moved
        return values - grad * float(group["lr"])


@final
class SGD8bit(LowBitSGD):
    """SGD with a momentum of 8 bits, in blocks of 256: see `LowBitSGD`."""

    bits = 8


@final
class SGD4bit(LowBitSGD):
    """SGD with a momentum of 4 bits, in blocks of 128: see `LowBitSGD`."""

    bits = 4


def _check_at_least_0(**options: float | Tensor) -> None:
    for name, value in options.items():
        check_number(name, value, least=0)


def _check_ways(**options: object) -> None:
    """Refuse torch's other ways to step: parameters go one by one here, in eager code."""
    for name, value in options.items():
        if name not in _WAYS:
            raise ConfigError(f'there is no option "{name}": {near(name, _WAYS)}')
        if value:
            raise ConfigError(
                f"an optimizer of few bits steps on one parameter after the other, found {name}="
                f"{value}",
                fix=f"leave {name} out",
            )


def _check_betas(betas: object) -> None:
    pair = betas if isinstance(betas, (tuple, list)) and len(betas) == 2 else (None, None)
    if not all(isinstance(beta, Real) and 0.0 <= float(beta) < 1.0 for beta in pair):
        raise ConfigError(
            f"betas are two numbers from 0 up to below 1, found {betas!r}", fix="betas=(0.9, 0.999)"
        )


def state_bytes(optimizer: Optimizer) -> int:
    """The bytes of an optimizer's states on this rank, scales and masters of parameters included.

    Args:
        optimizer: any; before its first step most have no states.

    Raises:
        ConfigError: it is no optimizer.
    """
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(
            f"state_bytes takes an optimizer, found {type(optimizer).__name__}",
            fix="give a torch.optim.Optimizer, or one of pq.training",
        )
    return sum(_bytes(value) for kept in optimizer.state.values() for value in kept.values())


def _bytes(value: Any) -> int:
    if isinstance(value, DTensor):
        value = value._local_tensor
    if isinstance(value, Tensor):
        parts: Iterable[Tensor] = [value]
        if hasattr(value, "__tensor_flatten__"):
            parts = [getattr(value, name) for name in value.__tensor_flatten__()[0]]
        return sum(part.numel() * part.element_size() for part in parts)
    if isinstance(value, dict):
        return sum(_bytes(part) for part in value.values())
    return 0
