"""The qparams of static activations of eager modules, and of functions, by running batches."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pt2e_quant.core.errors import CalibrationError
from pt2e_quant.core.schemes import Role, Scheme, TensorScheme
from pt2e_quant.flow.annotate.groups import Group
from pt2e_quant.flow.annotate.observer_choice import ObserverChoice
from pt2e_quant.flow.calibrate.pick_inputs import InputPick
from pt2e_quant.flow.prepare.make_observer import make_observer
from pt2e_quant.graph.op_table import Slot
from pt2e_quant.observers.training.trained_qparams import qparams_of
from pt2e_quant.tensors.function_ranges import FunctionRanges
from pt2e_quant.tensors.plan import Place
from pt2e_quant.tensors.run_batches import run_batches, watch_input


class Calibrated:
    """The result of calibration: the qparams of inputs by path, and of functions.

    No batch has called the modules of the paths in `unreached`.
    """

    def __init__(self) -> None:
        self.inputs: dict[str, tuple[Tensor, Tensor]] = {}
        self.unreached: set[str] = set()
        self.functions: FunctionRanges | None = None


def calibrated(
    module: nn.Module,
    places: Sequence[Place],
    scheme: Scheme | None,
    batches: list[Any] | None,
    inputs: InputPick | None,
    *,
    functions: bool,
) -> Calibrated:
    """Observe the inputs of modules with static activations, and functions if asked to."""
    made = Calibrated()
    static = [p for p in places if p.scheme.input is not None and not p.scheme.input.is_dynamic]
    if not static and not functions:
        return made
    if not batches:
        what = f'"{static[0].path}"' if static else "functions"
        raise CalibrationError(
            f"static activations of {what} need calibration data",
            fix="quantize_(…, calibration_data=batches), or a dynamic scheme",
        )
    observers = {place.path: _observer(place.scheme.input) for place in static}
    hooks = [watch_input(p.module, p.path, observers[p.path]) for p in static]
    ranges = FunctionRanges.of(module, scheme) if functions else None
    try:
        run_batches(module, batches, inputs, ranges)
    finally:
        for hook in hooks:
            hook.remove()
    for path, observer in observers.items():
        if has_seen(observer):
            made.inputs[path] = _static_qparams(observer, path)
        else:
            made.unreached.add(path)
    made.functions = ranges
    return made


def _observer(scheme: TensorScheme | None) -> Any:
    assert scheme is not None  # of a static place
    slot = Slot(at="x", role=Role.INPUT, accepts=(scheme,))
    return make_observer(Group(0, ObserverChoice().spec(slot, scheme)), {})


def has_seen(observer: Any) -> bool:
    """True if an observer of activations has seen data."""
    is_empty = hasattr(observer, "min_val") and observer.min_val.numel() == 0
    return getattr(observer, "seen", None) is not False and not is_empty


def _static_qparams(observer: Any, path: str) -> tuple[Tensor, Tensor]:
    try:
        return _qparams_of(observer)
    except CalibrationError as error:
        raise type(error)(f'the input of "{path}": {error.what}', fix=error.fix) from error


def _qparams_of(observer: Any) -> tuple[Tensor, Tensor]:
    if hasattr(observer, "block_qparams"):
        found = observer.block_qparams(1).scale
        return found.real().reshape(1), torch.zeros(1, dtype=torch.int32)
    qparams = qparams_of(observer)
    return qparams.scale.reshape(1), qparams.zero_point.reshape(1)
