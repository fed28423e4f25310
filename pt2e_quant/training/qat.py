"""Quantization-aware training of eager modules, by the graph flow's fake-quantizes."""

import json
import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from pt2e_quant.core.arguments import check_module
from pt2e_quant.core.errors import ConfigError, Pt2eQuantWarning, UnsupportedError
from pt2e_quant.core.qparams import QParams
from pt2e_quant.core.schemes import Role, Scheme, TensorScheme
from pt2e_quant.flow.annotate.groups import Group
from pt2e_quant.flow.annotate.observer_choice import ObserverChoice, is_plain
from pt2e_quant.flow.prepare.make_observer import make_observer
from pt2e_quant.flow.qat.train_ranges import for_training
from pt2e_quant.graph.op_table import Slot
from pt2e_quant.observers.training.fake_quantize import FakeQuantize, FakeQuantizeBase
from pt2e_quant.observers.training.trained_qparams import qparams_of
from pt2e_quant.tensors.calibrate_inputs import has_seen
from pt2e_quant.tensors.form import scheme_from_json, scheme_to_json
from pt2e_quant.tensors.plan import (
    Filter,
    Place,
    as_scheme,
    holds_transposed,
    places_of,
    upright,
    why_not,
)
from pt2e_quant.tensors.quantize import (
    Holders,
    check_layout,
    holders_of,
    put_in_place,
    with_input,
)
from pt2e_quant.tensors.quantized_tensor import QuantizedTensor
from pt2e_quant.tensors.report import EagerReport, Row

_INPUT = "input_fake_quantize"
_SCHEME = "qat_scheme"

_LIBRARY = torch.library.Library("pt2e_quant", "FRAGMENT")  # type: ignore[no-untyped-call]  # torch's own
_LIBRARY.define("round_trip(Tensor x, str scheme) -> Tensor")  # type: ignore[no-untyped-call]


def _scheme_text(scheme: TensorScheme) -> str:
    """A scheme as the operator takes it."""
    return json.dumps(scheme_to_json(scheme))


@lru_cache(maxsize=64)
def _scheme_of(text: str) -> TensorScheme:
    return scheme_from_json(json.loads(text))


def _run(x: Tensor, scheme: str) -> Tensor:
    return QuantizedTensor.from_float(x, _scheme_of(scheme)).dequantize()


def _fake(x: Tensor, scheme: str) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


torch.library.impl(_LIBRARY, "round_trip", "CompositeExplicitAutograd")(_run)
torch.library.register_fake("pt2e_quant::round_trip", lib=_LIBRARY)(_fake)

_ROUND_TRIP = torch.ops.pt2e_quant.round_trip.default
"""Quantize a tensor under a scheme's text, and dequantize it.

An operator, as the search for scales looks at values, which a compiler does not know.
"""


class _RoundTrip(torch.autograd.Function):
    """A tensor quantized and dequantized; the gradient passes through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scheme: str) -> Tensor:
        real: Tensor = _ROUND_TRIP(x, scheme)
        return real

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
        self.text = _scheme_text(scheme)

    def forward(self, X: Tensor) -> Tensor:
        """Quantize and dequantize X."""
        real: Tensor = _RoundTrip.apply(X, self.text)  # type: ignore[no-untyped-call]
        return real


class TransposedFakeQuantize(nn.Module):
    """The fake-quantize of a weight that is held as [in, out], by its rows of outputs.

    Args:
        fake_quantize: takes [out, in].
    """

    def __init__(self, fake_quantize: nn.Module) -> None:
        super().__init__()
        self.fake_quantize = fake_quantize

    def forward(self, X: Tensor) -> Tensor:
        """Quantize and dequantize X, float[in, out]."""
        real: Tensor = self.fake_quantize(X.t())
        return real.t()


def prepare_qat_(
    module: nn.Module, scheme: str | Scheme, filter: Filter | None = None
) -> nn.Module:
    """Let modules train with what quantization leaves of weights and static inputs, in place.

    Weights become parametrizations and inputs go through a hook, both by the fake-quantizes that
    `pq.prepare_qat` puts into a graph; `disable_observer` of `pt2e_quant.pt2e` and its like work on
    them. Inputs that are quantized at run time train in float, as they do there. Make the optimizer
    afterwards and end with `convert_qat_`.

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
        reason = why_not(place)
        if reason:
            raise ConfigError(
                f'"{place.name}" cannot be quantized: {reason}', fix="leave it out by the filter"
            )
    held, weights = holders_of(module), [place.weight for place in places]
    prepared: set[Tensor] = set()
    for place, weight in zip(places, weights, strict=True):
        _prepare(place, [] if weight in prepared else held[weight])
        prepared.add(weight)
    return module


def _prepare(place: Place, holders: Holders) -> None:
    owner, scheme = place.module, place.scheme
    assert scheme.weight is not None  # places have weights
    given = scheme.input
    if given is not None and not given.is_dynamic:
        owner.register_module(_INPUT, _fake_quantize(given, Role.INPUT))
        owner.register_forward_pre_hook(_quantize_input, with_kwargs=True)
    # All that read a tied weight train with what quantization leaves of it.
    made = _fake_quantize(scheme.weight, Role.WEIGHT, upright(owner)) if holders else None
    if made is not None and holds_transposed(owner):
        made = TransposedFakeQuantize(made)
    for holder, leaf in holders:
        assert made is not None
        parametrize.register_parametrization(holder, leaf, made)
    setattr(owner, _SCHEME, scheme)


def _fake_quantize(scheme: TensorScheme, role: Role, weight: Tensor | None = None) -> nn.Module:
    if is_plain(scheme) and not hasattr(scheme.granularity, "group_size"):
        slot = Slot(at=role.value, role=role, accepts=(scheme,))
        spec = for_training(ObserverChoice()).spec(slot, scheme)
        made = make_observer(Group(0, spec), {}, is_qat=True)
        if weight is not None and isinstance(made, FakeQuantize) and made.is_per_channel:
            made.start_channels(int(weight.shape[made.ch_axis]))
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
    places = [
        Place(path=path, module=owner, scheme=getattr(owner, _SCHEME))
        for path, owner in module.named_modules()
        if hasattr(owner, _SCHEME) and parametrize.is_parametrized(owner, "weight")
    ]
    if not places:
        raise ConfigError("no module was prepared", fix="training.prepare_qat_(module, scheme)")
    trained = [_fake_quantize_of(place.module, "weight") for place in places]
    for owner in list(module.modules()):
        for leaf in _prepared_names(owner, trained):
            parametrize.remove_parametrizations(owner, leaf, leave_parametrized=False)
    report, done = EagerReport(), dict[nn.Module, Row]()
    for place, fake_quantize in zip(places, trained, strict=True):
        ranges = _take_input(place)
        if fake_quantize in done:  # the weight is tied to one that is converted
            row = replace(done[fake_quantize], name=place.name)
        else:
            row = _convert(module, place, fake_quantize, ranges, layout)
        report.rows.append(done.setdefault(fake_quantize, row))
    return report


def _fake_quantize_of(owner: nn.Module, leaf: str) -> nn.Module:
    found = owner.parametrizations[leaf][0]  # type: ignore[index]  # torch's ModuleDict
    assert isinstance(found, nn.Module)
    return found.fake_quantize if isinstance(found, TransposedFakeQuantize) else found


def _prepared_names(owner: nn.Module, trained: Sequence[nn.Module]) -> list[str]:
    """The parameters of a module that `prepare_qat_` has parametrized."""
    if not parametrize.is_parametrized(owner):
        return []
    names = list(owner.parametrizations)  # type: ignore[arg-type]  # torch's ModuleDict
    return [name for name in names if _fake_quantize_of(owner, name) in trained]


def _take_input(place: Place) -> QParams | None:
    """Take the fake-quantize of a module's static input off; its qparams, if it has seen any."""
    owner = place.module
    delattr(owner, _SCHEME)
    fake_quantize = owner._modules.pop(_INPUT, None)
    if fake_quantize is None:
        return None
    hooks = owner._forward_pre_hooks
    for key in [key for key, hook in hooks.items() if hook is _quantize_input]:
        del hooks[key]
        owner._forward_pre_hooks_with_kwargs.pop(key, None)
    if has_seen(getattr(fake_quantize, "activation_post_process", fake_quantize)):
        return qparams_of(fake_quantize)
    # nn.MultiheadAttention, for one, multiplies with its projection's weight itself.
    warnings.warn(
        f'no call of "{place.path}" was trained: its input stays float, as it was in training',
        Pt2eQuantWarning,
        stacklevel=3,
    )
    return None


def _convert(
    module: nn.Module,
    place: Place,
    fake_quantize: nn.Module,
    ranges: QParams | None,
    layout: str,
) -> Row:
    weight, given = place.scheme.weight, place.scheme.input
    assert weight is not None
    is_static = given is not None and not given.is_dynamic
    is_affine = isinstance(fake_quantize, FakeQuantizeBase)
    tensor = QuantizedTensor.from_float(
        upright(place.module),
        weight,
        input=None if is_static and ranges is None else given,
        qparams=qparams_of(fake_quantize) if is_affine else None,
    )
    if ranges is not None:
        tensor = with_input(tensor, ranges.scale.reshape(1), ranges.zero_point.reshape(1))
    own = holders_of(module)[place.weight]
    return put_in_place(own, place, place.weight, tensor, layout)
