"""A measure of a model's outputs, summed over batches: a function, or an object with `update`."""

import copy
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any, Protocol, TypeAlias

from torch import Tensor
from torch.utils import _pytree as pytree

from pt2e_quant.core.errors import ConfigError
from pt2e_quant.flow.calibrate.calibrate import check_batches
from pt2e_quant.flow.calibrate.pick_inputs import InputPick, as_tensors, pick_inputs, pick_part

MetricFunction: TypeAlias = Callable[[Any, Any], Any]
"""Takes the outputs of one batch and its targets; returns a number."""

_LABELS = ("labels", "label", "targets", "target", "y")
"""The keys of dicts whose values are targets where nothing is said."""

_OF_FIRST = (None, 0, -2, [0], [-2], (0,), (-2,))
"""Input picks that take the first part of a pair."""


_EXAMPLE = "metric=lambda outputs, labels: (outputs.argmax(-1) == labels).float().mean()"


class MetricObject(Protocol):
    """The interface of torchmetrics' metrics."""

    def update(self, outputs: Any, targets: Any) -> object:
        """Add a batch."""

    def compute(self) -> Any:
        """The measure over all batches."""


Metric: TypeAlias = MetricFunction | MetricObject


class MetricSum:
    """A metric over batches.

    Args:
        metric: a function of outputs and targets, whose mean over samples is taken; or an object
            with `update` and `compute`, of which a copy is used.
    """

    def __init__(self, metric: Metric) -> None:
        self.function: MetricFunction | None = None
        self.object: Any = None
        is_object = all(callable(getattr(metric, name, None)) for name in ("update", "compute"))
        if is_object and not isinstance(metric, type):
            self.object = copy.deepcopy(metric)
            if callable(reset := getattr(self.object, "reset", None)):
                reset()
        elif callable(metric) and not is_object:
            _check_parameters(metric)
            self.function = metric
        else:
            found, fix = type(metric).__name__, _EXAMPLE
            if isinstance(metric, type):
                found, fix = f"the class {metric.__name__}", f"metric={metric.__name__}(…)"
            raise ConfigError(
                "a metric is a function of outputs and targets, or an object with update and "
                f"compute, found {found}",
                fix=fix,
            )
        self.total = 0.0
        self.samples = 0

    def add(self, outputs: Any, targets: Any) -> None:
        """Add one batch."""
        take = self.object.update if self.function is None else self.function
        try:
            measured = take(outputs, targets)
        except (TypeError, AttributeError) as error:
            if targets is not None and isinstance(outputs, Tensor):
                raise
            if targets is not None:
                raise ConfigError(
                    f"the metric failed on outputs that are a {type(outputs).__name__}: {error}",
                    fix="let it take what the model returns, and pick: outputs[0], outputs.logits",
                ) from error
            raise ConfigError(
                f"the metric failed on a batch without targets: {error}",
                fix="give batches (inputs, targets), or targets= where they are a part of them",
            ) from error
        if self.function is not None:
            count = samples_of(outputs)
            self.total += as_number(measured) * count
            self.samples += count

    def value(self) -> float:
        """The measure so far; NaN before the first batch."""
        if self.function is None:
            return as_number(self.object.compute())
        return self.total / self.samples if self.samples else math.nan


def _check_parameters(metric: Callable[..., Any]) -> None:
    """Refuse a function that cannot be called with outputs and targets."""
    try:
        signature = inspect.signature(metric)
    except ValueError:  # some built-in functions have none
        return
    try:
        signature.bind(None, None)
    except TypeError as error:
        name = getattr(metric, "__name__", type(metric).__name__)
        raise ConfigError(
            f"a metric takes outputs and targets, found {name}{signature}: {error}",
            fix="lambda outputs, targets: …, which may ignore the targets",
        ) from error


def samples_of(outputs: Any) -> int:
    """Return the number of samples of a batch: the first size of its first tensor."""
    for leaf in pytree.tree_leaves(outputs):
        if isinstance(leaf, Tensor) and leaf.dim():
            return max(1, int(leaf.shape[0]))
    return 1


def as_number(value: Any) -> float:
    """A metric's result as a number.

    Raises:
        ConfigError: it is none.
    """
    if isinstance(value, Tensor) and value.numel() == 1:
        return float(value)
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"a metric gives one number, found a {type(value).__name__}",
            fix="let it return a float, or a tensor of one element",
        ) from error


def split_batch(batch: Any, inputs: InputPick | None, targets: InputPick | None) -> tuple[Any, Any]:
    """Split a batch into the model's inputs and what the metric gets besides the outputs.

    Where nothing is said: of a pair (inputs, targets) the second part is the targets, of a dict the
    part named "labels" or like it; of anything else all are inputs, and the targets are None.
    Where the targets are named by an index or a key, the other parts are the inputs.
    """
    inputs, targets = _picks(batch, inputs, targets)
    return pick_inputs(batch, inputs), None if targets is None else _only(batch, targets)


def _picks(
    batch: Any, inputs: InputPick | None, targets: InputPick | None
) -> tuple[InputPick | None, InputPick | None]:
    """Return the picks of `split_batch` where the caller left some out."""
    if isinstance(batch, Mapping):
        key = next((key for key in _LABELS if key in batch), None)
        if targets is None and key is not None:
            targets = key
        if inputs is None and isinstance(targets, str):
            inputs = [key for key in batch if key != targets]
    elif isinstance(batch, (tuple, list)):
        # A function may pick anything; an index that is not of the second part picks the first.
        if len(batch) == 2 and targets is None and (callable(inputs) or inputs in _OF_FIRST):
            targets = 1
        if inputs is None and isinstance(targets, int):
            inputs = [at for at in range(len(batch)) if targets not in (at, at - len(batch))]
    return inputs, targets


@dataclass(frozen=True, slots=True, kw_only=True)
class Picker:
    """Takes batches apart as `split_batch` does.

    Attributes:
        inputs: as `split_batch` has it.
        targets: as `split_batch` has it.
        splits: whether there may be targets; otherwise all of a batch is the model's.
    """

    inputs: InputPick | None = None
    targets: InputPick | None = None
    splits: bool = True

    def __call__(self, batch: Any) -> tuple[Any, Any]:
        """Return the model's inputs of a batch, and the targets."""
        if not self.splits:
            return pick_inputs(batch, self.inputs), None
        return split_batch(batch, self.inputs, self.targets)

    def inputs_of(self, batch: Any) -> Any:
        """Return the model's inputs of a calibration batch, which need not have targets."""
        inputs = self.inputs
        if self.splits:
            inputs, _ = _picks(batch, inputs, self.targets)
        return pick_inputs(batch, inputs)


def picker(measure: object | None, inputs: InputPick | None, targets: InputPick | None) -> Picker:
    """Return a picker that splits batches; without a measure and targets all is the model's.

    Args:
        measure: the metric or the loss that takes targets; None if there is none.
        inputs: as `split_batch` has it.
        targets: as `split_batch` has it.
    """
    splits = measure is not None or targets is not None
    return Picker(inputs=inputs, targets=targets, splits=splits)


def _only(batch: Any, targets: InputPick) -> Any:
    """The targets: one part as it is, several as a dict or tuple."""
    if callable(targets):
        return as_tensors(targets(batch))
    if isinstance(targets, (str, int)):
        return pick_part(batch, targets, argument="targets")
    parts = {key: pick_part(batch, key, argument="targets") for key in targets}
    return parts if all(isinstance(key, str) for key in parts) else tuple(parts.values())


def batches_of(batches: Iterable[Any], call: str) -> Iterable[Any]:
    """Batches that can be gone through more than once: an iterator is read into a list.

    Args:
        batches: of tensors, pairs, dicts.
        call: what the user called, "{}" where the batches stand.

    Raises:
        InputError: it is no iterable of batches.
    """
    check_batches(batches, call)
    return list(batches) if iter(batches) is batches else batches


def first_of(batches: Iterable[Any]) -> Any:
    """The first batch, None if there is none; a DataLoader has no other way to it."""
    return next(iter(batches), None)


def measure_words(measure: object) -> str:
    """Describe a metric or loss in words that are the same in another process.

    A metric that computes something else has other words.

    Of a Python function: its name, its code and that of the functions in it, its defaults, and
    the values that it closes over. Of an object: its class and its state. A value whose text holds
    an address has other words each time. What a function reads of its module is not looked at.
    """
    return " ".join(_words(measure))


def _words(value: Any) -> Iterator[str]:
    if isinstance(value, partial):
        yield "partial"
        yield from _words(value.func)
        yield from _each([*value.args, *value.keywords.items()])
    elif isinstance(value, MethodType):
        yield from _words(value.__func__)
        yield from _words(value.__self__)
    elif isinstance(value, FunctionType):
        yield value.__qualname__
        yield from _code(value.__code__)
        yield from _each(value.__defaults__ or ())
        yield from _each((value.__kwdefaults__ or {}).items())
        for cell in value.__closure__ or ():
            try:
                yield from _each([cell.cell_contents])
            except ValueError:  # not set yet
                yield "empty"
    else:
        yield getattr(value, "__qualname__", type(value).__name__)
        if hasattr(value, "__dict__") and not isinstance(value, type):
            yield from _each(vars(value).items())


def _each(values: Any) -> Iterator[str]:
    for value in values:
        is_callable = isinstance(value, (partial, MethodType, FunctionType))
        listed = value.tolist() if hasattr(value, "tolist") else value  # not cut as in its text
        yield from _words(value) if is_callable else [repr(listed)]


def _code(code: CodeType) -> Iterator[str]:
    yield f"{code.co_code.hex()} {code.co_names}"
    for constant in code.co_consts:
        if isinstance(constant, frozenset):  # whose order is another one in each process
            constant = sorted(map(repr, constant))
        yield from _code(constant) if isinstance(constant, CodeType) else [repr(constant)]
