"""Parameters that are stored in a quantized format while they train.

Between steps there are codes and scales and nothing else. The optimizer of
`training.with_master_weights` holds real values of its own and quantizes them again after a step.
"""

from collections.abc import Callable, Mapping
from typing import Any, cast, final

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from pt2e_quant.core.arguments import (
    check_dtype,
    check_filter,
    check_initialized,
    check_module,
    check_number,
)
from pt2e_quant.core.dtypes import info
from pt2e_quant.core.errors import ConfigError, Pt2eQuantError, UnsupportedError, member_named, near
from pt2e_quant.core.formats.blocks import spread
from pt2e_quant.core.formats.float_codes import decode_float
from pt2e_quant.core.formats.number_formats import CodeBook, FloatFormat
from pt2e_quant.core.schemes import Scheme, TensorScheme
from pt2e_quant.tensors.form import TensorForm
from pt2e_quant.tensors.graphs.graph import turned
from pt2e_quant.tensors.plan import (
    Filter,
    Place,
    aligned,
    as_scheme,
    holds_transposed,
    is_known,
    upright,
    why_not,
)
from pt2e_quant.tensors.quantized_tensor import (
    ATEN,
    QuantizedTensor,
    rebuild_quantized_tensor,
)
from pt2e_quant.tensors.values import encode, real_scale
from pt2e_quant.training.rounding import Rounding, round_to_integers
from pt2e_quant.training.stored_shards import SHARDING, bytes_to_gather, join_bytes


@final
class StoredParameter(QuantizedTensor):
    """A parameter that is codes and scales.

    Attributes:
        rounding: how real values become codes.
        every: after how many steps of the optimizer they do.
        steps: of the optimizer since they last did.
        requantizations: how often they have.
        own_grad_dtype: of the gradients, if it is another than the weight's.
    """

    rounding: Rounding = Rounding.NEAREST
    every: int = 1
    steps: int = 0
    requantizations: int = 0
    own_grad_dtype: torch.dtype | None = None

    def take_step(self, values: Tensor, ranges: Callable[[Tensor], Tensor] | None = None) -> None:
        """Take over real values after a step of the optimizer, if it is time to.

        Args:
            values: float, of this shape.
            ranges: gives what scales are found from; the values themselves if None.
        """
        self.steps += 1
        if self.steps < self.every:
            return
        self.steps = 0
        self.requantizations += 1
        found = values if ranges is None else ranges(values)
        self.requantize_(values, encode=_ENCODERS[self.rounding], ranges=found)

    def like(self, parts: Mapping[str, Tensor], form: TensorForm) -> "StoredParameter":
        """One with other parts, treated the same."""
        made = StoredParameter(parts, form)
        for name in ("rounding", "every", "steps", "requantizations", "own_grad_dtype"):
            setattr(made, name, getattr(self, name))
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> "StoredParameter":
        made = self.like({name: part.clone() for name, part in self.parts.items()}, self.form)
        memo[id(self)] = made
        made.requires_grad_(self.requires_grad)
        made._is_param = getattr(self, "_is_param", False)
        if self.is_leaf:
            made.grad_dtype = self.grad_dtype
        made.grad = None if self.grad is None else self.grad.clone()
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares its default as a function
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in SHARDING:
            made = SHARDING[func](func, args, kwargs or {})
            if made is not NotImplemented:
                return made
        elif func.namespace == "c10d" and func not in ATEN:
            raise UnsupportedError(
                f"{func} is not done on a parameter stored as {_scheme_of(args)}",
                fix="communicate dequantize()",
            )
        if func._schema.name.removeprefix("aten::") in _STEPS and _is_stored(args[0]):
            raise UnsupportedError(
                f"{func} cannot step on the codes of a parameter stored as {_scheme_of(args)}: "
                "what is smaller than a step would be lost",
                fix="training.with_master_weights(torch.optim.AdamW, model, lr=…)",
            )
        return super().__torch_dispatch__(func, types, args, kwargs)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        rebuild, args = super().__reduce_ex__(protocol)
        if not isinstance(self, nn.Parameter):
            return rebuild, args  # of a state dict, which any process reads
        own = {name: getattr(self, name) for name in ("every", "steps", "requantizations")}
        return rebuild_stored_parameter, (args, self.rounding.value, own, self.own_grad_dtype)

    def fsdp_pre_all_gather(
        self,
        mesh: DeviceMesh,
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],
        module: nn.Module,
        mp_policy: Any,
    ) -> tuple[tuple[Tensor, ...], torch.Size]:
        """The codes and scales of the shard, as bytes."""
        return bytes_to_gather(self, mesh.size(), outer_size)

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[Tensor, ...],
        metadata: torch.Size,
        param_dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """The whole parameter, stored likewise."""
        whole, parts = join_bytes(self, all_gather_outputs, metadata, param_dtype)
        if out is None:
            return whole, parts
        local = out._local_tensor if isinstance(out, DTensor) else out
        assert isinstance(local, StoredParameter)
        for into, part in zip(local.parts.values(), whole.parts.values(), strict=True):
            into.copy_(part)
        return None

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        own = (self.rounding, self.every)
        return list(self.part_names), (self.form, own)

    @classmethod
    def __tensor_unflatten__(
        cls,
        parts: dict[str, Tensor],
        form: Any,
        outer_size: Any = None,
        outer_stride: Any = None,
    ) -> "StoredParameter":
        own_form, (rounding, every) = form
        made = StoredParameter(parts, own_form)
        made.rounding, made.every = rounding, every
        return made


_IN_PLACE = ("add_", "sub_", "mul_", "div_", "addcmul_", "addcdiv_", "lerp_")
_STEPS = {
    *_IN_PLACE,
    *(f"_foreach_{name}" for name in _IN_PLACE),
    *(f"_fused_{name}_" for name in ("adam", "adamw", "sgd", "adagrad")),
}
"""Operators that optimizers step with, without their namespace."""


def _is_stored(written: Any) -> bool:
    return any(
        isinstance(leaf, StoredParameter) for leaf in torch.utils._pytree.tree_leaves(written)
    )


def rebuild_stored_parameter(
    args: tuple[Any, ...], rounding: str, own: dict[str, int], grad_dtype: torch.dtype | None
) -> StoredParameter:
    """Rebuild a parameter for `pickle`; a safe global of `torch.load`."""
    tensor = rebuild_quantized_tensor(*args)
    made = StoredParameter(tensor.parts, tensor.form, tensor.requires_grad)
    made._is_param = True
    made.rounding, made.own_grad_dtype = Rounding(rounding), grad_dtype
    for name, value in own.items():
        setattr(made, name, value)
    if grad_dtype is not None:
        made.grad_dtype = grad_dtype
    return made


torch.serialization.add_safe_globals([rebuild_stored_parameter])


def _scheme_of(args: Any) -> str:
    leaves = torch.utils._pytree.tree_leaves(args)
    return next(str(leaf.scheme) for leaf in leaves if isinstance(leaf, QuantizedTensor))


def encode_stochastically(values: Tensor, parts: Mapping[str, Tensor], form: TensorForm) -> Tensor:
    """Codes as `values.encode` gives, of one of the two neighbours by chance.

    Args:
        values: real values.
        parts: their qparams.
        form: what the codes are of.
    """
    scheme = form.scheme
    scale = spread(real_scale(parts, form).to(torch.float32), form.shape, form.block)
    if "tensor_scale" in parts:
        scale = scale * parts["tensor_scale"]
    scaled = values.to(torch.float32) / scale
    if scheme.format is not None:
        return _one_of_neighbours(scaled, scheme.format)
    if "zero_point" in parts:
        scaled = scaled + spread(parts["zero_point"], form.shape, form.block)
    low, high = scheme.range
    codes = round_to_integers(scaled, Rounding.STOCHASTIC).clamp(low, high)
    return codes.to(info(scheme.dtype).storage)


def _one_of_neighbours(scaled: Tensor, form: FloatFormat | CodeBook) -> Tensor:
    values, codes = _sorted_values(form, scaled.device)
    inside = scaled.clamp(values[0], values[-1]).contiguous()
    upper = torch.searchsorted(values, inside).clamp(1, values.numel() - 1)
    low, high = values[upper - 1], values[upper]
    is_up = torch.rand_like(inside) * (high - low) < inside - low
    return codes[torch.where(is_up, upper, upper - 1)]


def _sorted_values(form: FloatFormat | CodeBook, device: torch.device) -> tuple[Tensor, Tensor]:
    """The values of a format's codes in ascending order, and the codes."""
    if isinstance(form, CodeBook):
        table = form.table().to(device)
        return table, torch.arange(table.numel(), dtype=torch.uint8, device=device)
    codes = torch.arange(1 << form.bits, device=device).to(torch.uint8).view(form.storage)
    values = decode_float(codes, form)
    # one of both zeros; neither NaN nor infinities
    is_own = values.isfinite() & ~((values == 0) & values.signbit())
    order = values[is_own].argsort()
    kept = codes.view(torch.uint8)[is_own][order]
    return values[is_own][order], kept.view(form.storage)


_Encode = Callable[[Tensor, Mapping[str, Tensor], TensorForm], Tensor]
_ENCODERS: Mapping[Rounding, _Encode] = {
    Rounding.NEAREST: encode,
    Rounding.STOCHASTIC: encode_stochastically,
}


def quantize_parameters(
    module: nn.Module,
    scheme: str | Scheme | TensorScheme,
    grad_dtype: torch.dtype | None = None,
    rounding: str = "nearest",
    every: int = 1,
    filter: Filter | None = None,
) -> nn.Module:
    """Store the weights of linears, embeddings and convolutions in a format, in place, to train so.

    `Conv1D` of transformers, GPT-2's linear, is one of the linears.

    Train with an optimizer that `with_master_weights` makes: torch's own cannot step on codes.

    Args:
        module: the model.
        scheme: how weights are stored, in less than 16 bits: a name, a scheme or its weights'.
        grad_dtype: of the gradients; the weight's own dtype if None.
        rounding: "nearest", or "stochastic", which is right on average.
        every: quantize the real values again after so many steps of the optimizer.
        filter: which modules, by module and dotted name; all of these kinds if None.

    Returns:
        The model.

    Raises:
        ConfigError: the scheme stores no weights in less than 16 bits, its tables are fitted and
            rounding is stochastic, there is no such rounding, gradients are no floats, or no weight
            is meant.
    """
    check_module("module", module)
    check_initialized(module)
    check_filter(filter)
    wanted, chosen = _weight_scheme(scheme), member_named(Rounding, rounding, "rounding")
    _check_options(wanted, chosen, grad_dtype, every)
    made: dict[nn.Parameter, nn.Parameter] = {}
    owners: list[nn.Module] = []
    names = []
    for name, owner in module.named_modules(remove_duplicate=False):
        if not is_known(owner):
            continue
        names.append(name)
        if filter is not None and not filter(owner, name):
            continue
        if isinstance(owner.weight, QuantizedTensor):
            raise ConfigError(f'the weight of "{name}" is quantized already')
        if reason := why_not(Place(path=name, module=owner, scheme=wanted)):
            raise ConfigError(
                f'the weight of "{name}" cannot be stored as {_weight_of(wanted)}: {reason}',
                fix="leave it out by the filter",
            )
        weight = owner.weight
        assert isinstance(weight, nn.Parameter)  # `why_not` says so
        owners.append(owner)
        if weight not in made:
            own = _weight_of(aligned(wanted, owner))
            try:
                made[weight] = _stored(owner, own, grad_dtype, chosen, every)
            except Pt2eQuantError as error:
                raise ConfigError(
                    f'the weight of "{name}" cannot be stored as {own}: {error}',
                    fix="leave it out by the filter",
                ) from error
    if not made:
        raise ConfigError("no weight is meant", fix=f"modules with weights, {near('', names)}")
    for owner in dict.fromkeys(owners):  # all or none
        owner.weight = made[cast(nn.Parameter, owner.weight)]
    return module


def _check_options(
    scheme: Scheme, rounding: Rounding, grad_dtype: torch.dtype | None, every: int
) -> None:
    form = _weight_of(scheme).format
    if rounding is Rounding.STOCHASTIC and isinstance(form, CodeBook) and form.is_fitted:
        raise ConfigError(
            f"{form} has a table fitted to each weight, which stochastic rounding cannot read",
            fix='rounding="nearest", or a code book with values',
        )
    check_number("every", every, least=1, is_whole=True)
    if grad_dtype is not None:
        check_dtype("grad_dtype", grad_dtype)


def _weight_scheme(scheme: str | Scheme | TensorScheme) -> Scheme:
    if isinstance(scheme, TensorScheme):
        scheme = Scheme(name=str(scheme), input=None, output=None, weight=scheme)
    found = as_scheme(scheme)
    if _weight_of(found).bits >= 16:
        raise ConfigError(
            f"{found.name} does not store weights in less than 16 bits",
            fix='for example scheme="w8"',
        )
    return found


def _weight_of(scheme: Scheme) -> TensorScheme:
    assert scheme.weight is not None  # `as_scheme` refuses others
    return scheme.weight


def _stored(
    owner: nn.Module,
    scheme: TensorScheme,
    grad_dtype: torch.dtype | None,
    rounding: Rounding,
    every: int,
) -> nn.Parameter:
    layout = "packed" if scheme.bits < 8 else "plain"
    weight = owner.get_parameter("weight")
    quantized = QuantizedTensor.from_float(upright(owner).detach(), scheme, layout=layout)
    if holds_transposed(owner):
        quantized = turned(quantized)
    made = StoredParameter(quantized.parts, quantized.form)
    made.rounding, made.every, made.own_grad_dtype = rounding, every, grad_dtype
    param = nn.Parameter(made, requires_grad=weight.requires_grad)
    if grad_dtype is not None:
        param.grad_dtype = grad_dtype
    return param
