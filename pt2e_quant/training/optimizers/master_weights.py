"""An optimizer that steps on copies of parameters: in another precision, or on the CPU."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer

from pt2e_quant.core.arguments import (
    check_dtype,
    check_initialized,
    check_tensor,
    check_type,
    found_text,
)
from pt2e_quant.core.errors import ConfigError, near
from pt2e_quant.tensors.quantized_tensor import QuantizedTensor
from pt2e_quant.training.optimizers.states import load_exactly
from pt2e_quant.training.stored_parameters import StoredParameter
from pt2e_quant.training.stored_shards import extremes_of_whole, real_values

_MASTER = "master"


@final
class MasterWeightOptimizer(Optimizer):
    """Another optimizer's step on copies of parameters, which are written back after it.

    Its groups and states look like those of an optimizer over the parameters themselves. The
    state of a parameter has its copy too, as "master". Options of groups, such as lr, are handed
    to the other optimizer at each step, so that schedulers work.

    Args:
        optimizer_class: the optimizer.
        groups: groups of parameters, with options of their own.
        copy: makes a parameter's copy; gives the parameter itself if none is needed.
        options: those of the optimizer.
    """

    def __init__(
        self,
        optimizer_class: type[Optimizer],
        groups: list[dict[str, Any]],
        copy: Callable[[Tensor], Tensor],
        options: Mapping[str, Any],
    ) -> None:
        copies = {param: copy(param) for group in groups for param in group["params"]}
        own = [group | {"params": [copies[p] for p in group["params"]]} for group in groups]
        self.inner = optimizer_class(own, **options)
        self.copies = copies
        self.copy = copy
        super().__init__(groups, self.inner.defaults)

    def __getstate__(self) -> dict[str, Any]:
        more = {"inner": self.inner, "copies": self.copies, "copy": self.copy}
        return super().__getstate__() | more

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, with options of its own, and copies of them.

        Raises:
            ValueError: a parameter is in another group already; torch says so.
        """
        super().add_param_group(param_group)
        if len(self.param_groups) <= len(self.inner.param_groups):
            return  # the constructor's own
        group = self.param_groups[-1]
        self.copies |= {param: self.copy(param) for param in group["params"]}
        self.inner.add_param_group(group | {"params": [self.copies[p] for p in group["params"]]})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step on the copies; then parameters take over what came of it."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group, own in zip(self.param_groups, self.inner.param_groups, strict=True):
            own.update({name: value for name, value in group.items() if name != "params"})
        trained = [param for param in self.copies if param.grad is not None]
        for param in trained:
            copy = self.copies[param]
            if copy is not param:
                assert param.grad is not None
                copy.grad = param.grad.to(copy.device, copy.dtype)
        self.inner.step()
        for param in trained:
            copy = self.copies[param]
            self.state[param] = dict(self.inner.state[copy])
            if copy is not param:
                copy.grad = None
                self.state[param][_MASTER] = copy
                _write_back(param, copy)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state dict, masters included; parameters are those of the model's own."""
        super().load_state_dict(state_dict)
        load_exactly(self, state_dict)
        for param, copy in self.copies.items():
            if param not in self.state:
                continue
            own = dict(self.state[param])
            master = own.pop(_MASTER, None)
            if master is not None:
                with torch.no_grad():
                    copy.copy_(master)
                self.state[param][_MASTER] = copy
            for name, value in own.items():
                if isinstance(value, Tensor) and value.device != copy.device and name != "step":
                    own[name] = value.to(copy.device)
            self.inner.state[copy] = own


def _write_back(param: Tensor, values: Tensor) -> None:
    if isinstance(param, StoredParameter):
        param.take_step(values.to(param.device))
        return
    stored = param._local_tensor if isinstance(param, DTensor) else None
    if isinstance(param, DTensor) and isinstance(stored, StoredParameter):
        assert isinstance(values, DTensor)
        local = values._local_tensor.to(stored.device)
        stored.take_step(local, partial(extremes_of_whole, param))
        return
    param.copy_(values)


def with_master_weights(
    optimizer_class: type[Optimizer],
    module: nn.Module | Iterable[dict[str, Any]],
    dtype: torch.dtype = torch.float32,
    *,
    values: Mapping[str, Tensor] | None = None,
    device: torch.device | str | None = None,
    **options: Any,
) -> MasterWeightOptimizer:
    """An optimizer that keeps a copy of each parameter in another precision, and steps on it.

    For parameters stored in a format (`quantize_parameters`) and for those in bfloat16.
    Parameters that have the dtype already have no copy.

    Args:
        optimizer_class: any optimizer, `torch.optim.AdamW` or `training.AdamW8bit`, say.
        module: the model, or groups of parameters.
        dtype: of the copies, float32 or bfloat16.
        values: what copies start from, by parameter's name: the state dict of the model before
            its parameters were quantized, say. They start from the parameters where it has none.
        device: where copies and states are; with their parameter if None.
        options: the optimizer's: lr, ….

    Raises:
        ConfigError: values are given for groups, name no parameter or have another shape; or an
            argument is of another kind.
    """
    _check_arguments(optimizer_class, module, dtype, values)
    start = _start_values(module, values or {})
    place = None if device is None else torch.device(device)

    if isinstance(module, nn.Module):
        groups = [{"params": [p for p in module.parameters() if p.requires_grad]}]
    else:
        groups = [_group(group) for group in module]
    return MasterWeightOptimizer(optimizer_class, groups, _Copy(start, dtype, place), options)


@dataclass(frozen=True, slots=True)
class _Copy:
    """Makes the copies of parameters; a class, so that the optimizer can be pickled.

    Args:
        start: what copies of some parameters start from.
        dtype: of the copies.
        place: where they are; with their parameter if None.
    """

    start: dict[Tensor, Tensor]
    dtype: torch.dtype
    place: torch.device | None

    def __call__(self, param: Tensor) -> Tensor:
        """A parameter's copy; the parameter itself if none is needed."""
        given = self.start.get(param)
        where = self.place or param.device
        is_stored = isinstance(getattr(param, "_local_tensor", param), QuantizedTensor)
        if not is_stored and given is None and (param.dtype, param.device) == (self.dtype, where):
            return param
        real = real_values(param.detach()) if given is None else given
        return nn.Parameter(real.to(where, self.dtype, copy=True), requires_grad=True)


def _check_arguments(
    optimizer_class: object, module: object, dtype: object, values: object
) -> None:
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, Optimizer)):
        raise ConfigError(
            f"optimizer_class is a class of optimizers, found {found_text(optimizer_class)}",
            fix="with_master_weights(torch.optim.AdamW, model, lr=…)",
        )
    if not isinstance(module, (nn.Module, Iterable)) or isinstance(module, (str, Tensor, Mapping)):
        raise ConfigError(
            f"module is a model or a list of groups of parameters, found {found_text(module)}",
            fix="with_master_weights(torch.optim.AdamW, model, lr=…)",
        )
    if isinstance(module, nn.Module):
        check_initialized(module)
    check_dtype("dtype", dtype)
    if values is not None:
        check_type("values", values, Mapping, "a state dict", fix="values=model.state_dict()")


def _group(group: object) -> dict[str, Any]:
    if not isinstance(group, Mapping) or "params" not in group:
        raise ConfigError(
            f'a group is a dict with "params", found {found_text(group)}',
            fix='give the model, or [{"params": list(model.parameters())}]',
        )
    return dict(group) | {"params": list(group["params"])}


def with_cpu_offload(
    optimizer_class: type[Optimizer],
    module: nn.Module | Iterable[dict[str, Any]],
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> MasterWeightOptimizer:
    """An optimizer whose states, and copies of parameters to step on, are on the CPU.

    The device then holds parameters and gradients alone. Each step moves the gradients to the CPU
    and the parameters back.

    Args:
        optimizer_class: any optimizer.
        module: the model, or groups of parameters.
        dtype: of the copies.
        options: the optimizer's: lr, ….
    """
    return with_master_weights(optimizer_class, module, dtype, device="cpu", **options)


def _start_values(
    module: nn.Module | Iterable[dict[str, Any]], values: Mapping[str, Tensor]
) -> dict[Tensor, Tensor]:
    if not values:
        return {}
    if not isinstance(module, nn.Module):
        raise ConfigError("values go by the names of a module's parameters", fix="give the module")
    named = dict(module.named_parameters())
    for name, value in values.items():
        if name in named:
            check_tensor(f'values["{name}"]', value)
            if value.shape != named[name].shape:
                shapes = f"{tuple(named[name].shape)}, found {tuple(value.shape)}"
                raise ConfigError(f'values["{name}"] has the shape {shapes}')
    found = {named[name]: value.detach() for name, value in values.items() if name in named}
    stored = {n for n, p in named.items() if isinstance(p, QuantizedTensor)}
    if missing := sorted(stored - set(values)):
        raise ConfigError(
            f'values have none for the parameter "{missing[0]}"', fix=near(missing[0], values)
        )
    return {p: v for p, v in found.items() if isinstance(p, QuantizedTensor)}
