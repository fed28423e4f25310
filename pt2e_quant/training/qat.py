"""Quantization-aware training of eager modules, by the graph flow's fake-quantizes."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from pt2e_quant.core.arguments import check_module
from pt2e_quant.core.errors import ConfigError, UnsupportedError
from pt2e_quant.core.schemes import Role, Scheme, TensorScheme
from pt2e_quant.flow.annotate.groups import Group
from pt2e_quant.flow.annotate.observer_choice import ObserverChoice, is_plain
from pt2e_quant.flow.prepare.make_observer import make_observer
from pt2e_quant.flow.qat.train_ranges import for_training
from pt2e_quant.graph.op_table import Slot
from pt2e_quant.observers.training.fake_quantize import FakeQuantizeBase
from pt2e_quant.observers.training.trained_qparams import qparams_of
from pt2e_quant.tensors.plan import Filter, Place, as_scheme, places_of, why_not
from pt2e_quant.tensors.quantize import check_layout, holders_of, put_in_place, with_input
from pt2e_quant.tensors.quantized_tensor import QuantizedTensor
from pt2e_quant.tensors.report import EagerReport, Row

_INPUT = "input_fake_quantize"
_SCHEME = "qat_scheme"


class _RoundTrip(torch.autograd.Function):
    """A tensor quantized and dequantized; the gradient passes through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scheme: TensorScheme) -> Tensor:
        return QuantizedTensor.from_float(x, scheme).dequantize()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None


class FormatFakeQuantize(nn.Module):
    """The fake-quantize of weights in any format: groups, blocks, small floats, tables.

    The graph flow's fake-quantizes know evenly spaced integers per tensor and per channel.
    """

    def __init__(self, scheme: TensorScheme) -> None:
        super().__init__()
        self.scheme = scheme

    def forward(self, X: Tensor) -> Tensor:
        """Quantize and dequantize X."""
        real: Tensor = _RoundTrip.apply(X, self.scheme)  # type: ignore[no-untyped-call]
        return real


def prepare_qat_(
    module: nn.Module, scheme: str | Scheme, filter: Filter | None = None
) -> nn.Module:
    """Let modules train with what quantization leaves of weights and static inputs, in place.

    Weights become parametrizations and inputs go through a hook, both by the fake-quantizes that
    `pq.prepare_qat` puts into a graph; `pq.disable_observer` and its like work on them. Inputs
    that are quantized at run time train in float, as they do there. Make the optimizer afterwards
    and end with `convert_qat_`.

    Args:
        module: the model.
        scheme: as for `quantize_`.
        filter: which modules, by module and path; linears if None.

    Returns:
        The model.

    Raises:
        ConfigError: no module is meant, or a weight cannot be quantized.
        UnsupportedError: the scheme has static inputs that no fake-quantize knows.
    """
    places = places_of(module, as_scheme(scheme), filter)
    if not places:
        raise ConfigError("no module is to be quantized", fix="give a filter that takes some")
    for place in places:
        if reason := why_not(place):
            raise ConfigError(f'"{place.name}" cannot be quantized: {reason}')
        _prepare(place)
    return module


def _prepare(place: Place) -> None:
    owner, scheme = place.module, place.scheme
    assert scheme.weight is not None  # places have weights
    given = scheme.input
    if given is not None and not given.is_dynamic:
        owner.register_module(_INPUT, _fake_quantize(given, Role.INPUT))
        owner.register_forward_pre_hook(_quantize_input, with_kwargs=True)
    made = _fake_quantize(scheme.weight, Role.WEIGHT)
    parametrize.register_parametrization(owner, "weight", made)
    setattr(owner, _SCHEME, scheme)


def _fake_quantize(scheme: TensorScheme, role: Role) -> nn.Module:
    if is_plain(scheme) and not hasattr(scheme.granularity, "group_size"):
        slot = Slot(at=role.value, role=role, accepts=(scheme,))
        spec = for_training(ObserverChoice()).spec(slot, scheme)
        made = make_observer(Group(0, spec), {}, is_qat=True)
        if isinstance(made, FakeQuantizeBase):
            return made
    if role is Role.WEIGHT:
        return FormatFakeQuantize(scheme)
    raise UnsupportedError(
        f"no fake-quantize knows static inputs of {scheme}",
        fix="train with inputs that are quantized at run time, or weights alone",
    )


def _quantize_input(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    fake_quantize = module.get_submodule(_INPUT)
    if args:
        return (fake_quantize(args[0]), *args[1:]), kwargs
    first = next(iter(kwargs))
    return args, kwargs | {first: fake_quantize(kwargs[first])}


def convert_qat_(module: nn.Module, layout: str = "auto") -> EagerReport:
    """Quantize, in place, what `prepare_qat_` prepared, by the qparams that it trained with.

    Args:
        module: the model.
        layout: as for `quantize_`.

    Returns:
        What became of each weight.

    Raises:
        ConfigError: nothing was prepared.
    """
    check_module("module", module)
    check_layout(layout)
    report = EagerReport()
    for path, owner in list(module.named_modules()):
        scheme = getattr(owner, _SCHEME, None)
        if scheme is None or not parametrize.is_parametrized(owner, "weight"):
            continue
        place = Place(path=path, module=owner, scheme=scheme)
        report.rows.append(_convert(module, place, layout))
    if not report.rows:
        raise ConfigError("no module was prepared", fix="training.prepare_qat_(module, scheme)")
    return report


def _convert(module: nn.Module, place: Place, layout: str) -> Row:
    owner, scheme = place.module, place.scheme
    assert scheme.weight is not None
    fake_quantize = owner.parametrizations["weight"][0]  # type: ignore[index]  # torch's ModuleDict
    parametrize.remove_parametrizations(owner, "weight", leave_parametrized=False)
    delattr(owner, _SCHEME)
    is_affine = isinstance(fake_quantize, FakeQuantizeBase)
    tensor = QuantizedTensor.from_float(
        place.weight,
        scheme.weight,
        input=scheme.input,
        qparams=qparams_of(fake_quantize) if is_affine else None,
    )
    if _INPUT in owner._modules:
        found = qparams_of(owner._modules.pop(_INPUT))
        tensor = with_input(tensor, found.scale.reshape(1), found.zero_point.reshape(1))
        hooks = owner._forward_pre_hooks
        for key in [key for key, hook in hooks.items() if hook is _quantize_input]:
            del hooks[key]
    own = holders_of(module)[place.weight]
    return put_in_place(own, place, place.weight, tensor, layout)
