"""Pick what a model takes out of the batches that a data loader gives.

A loader made for training yields labels too: `(images, labels)`, or a dict with a `labels` key.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from pt2e_quant.core.capture import Capture
from pt2e_quant.core.errors import InputError, near

InputPick: TypeAlias = str | int | Sequence[str | int] | Callable[[Any], Any]
"""What of a batch the model takes.

A key or an index: that part is the only input. Several keys: keyword arguments of these names.
Several indices: positional arguments. A function: of the batch, returns a batch as `calibrate`
takes it.
"""


def as_call(batch: Any) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """(args, kwargs) of a batch: a mapping is kwargs, a tuple or list args, else one argument."""
    if isinstance(batch, Mapping):
        return (), batch
    if isinstance(batch, (tuple, list)):
        return batch, {}
    return (batch,), {}


def pick_inputs(batch: Any, inputs: InputPick | None) -> Any:
    """The part of a batch that the model takes; the whole batch where `inputs` is None.

    >>> pick_inputs(("image", "label"), 0)
    ('image',)
    >>> pick_inputs({"x": 1, "mask": 2, "labels": 3}, ["x", "mask"])
    {'x': 1, 'mask': 2}

    Raises:
        InputError: the batch has no such part.
    """
    if inputs is None:
        return batch
    if callable(inputs):
        return inputs(batch)
    if isinstance(inputs, (str, int)):
        return (_part(batch, inputs),)
    keys = list(inputs)
    if all(isinstance(key, str) for key in keys):
        return {str(key): _part(batch, key) for key in keys}
    return tuple(_part(batch, key) for key in keys)


def suggest_pick(capture: Capture, batch: Any) -> str:
    """The `inputs=` argument that makes a refused batch fit; "" if leaving parts out does not."""
    for pick in _candidates(capture, batch):
        args, kwargs = as_call(pick_inputs(batch, pick))
        try:
            capture.bind(args, kwargs)
        except InputError:
            continue
        return f"inputs={pick!r}"
    return ""


def _candidates(capture: Capture, batch: Any) -> list[InputPick]:
    if isinstance(batch, Mapping):
        names = [name for name in capture.arg_names if name in batch]
        return [names] if 0 < len(names) < len(batch) else []
    if isinstance(batch, (tuple, list)):
        parts = len(batch)
        single: list[InputPick] = list(range(parts)) if parts > 1 else []
        return [*single, *(list(range(count)) for count in range(2, parts))]
    return []


def _part(batch: Any, key: str | int) -> Any:
    try:
        return batch[key]
    except (KeyError, IndexError, TypeError) as error:
        what = f"a {type(batch).__name__}"
        if isinstance(batch, Mapping):
            what += f" with {near(str(key), map(str, batch))}"
        elif isinstance(batch, (tuple, list)):
            what += f" of {len(batch)} parts"
        raise InputError(
            f"inputs={key!r} is no part of the batch, which is {what}",
            fix="give a key of the dict, an index of the tuple, or a function of the batch",
        ) from error
