"""Pick the model's inputs from the batches of a data loader.

A loader made for training yields labels too: `(images, labels)`, or a dict with a `labels` key.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeAlias

import numpy as np
import torch

from pt2e_quant.core.capture import Capture
from pt2e_quant.core.errors import InputError, near

InputPick: TypeAlias = str | int | Sequence[str | int] | Callable[[Any], Any]
"""The parts of a batch that the model takes.

A key or an index: that part is the only input. An index whose part is a dict, or a tuple or list of
tensors, as of `((image, mask), label)`: its parts are the inputs. Several keys: keyword arguments
of these names. Several indices: positional arguments. A function: of the batch, returns a batch as
`calibrate` takes it.
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
    >>> pick_inputs(({"x": 1, "mask": 2}, "label"), 0)
    {'x': 1, 'mask': 2}

    A batch that is a tensor has one part, itself.

    Raises:
        InputError: the batch has no such part.
    """
    if inputs is None:
        return as_tensors(batch)
    if callable(inputs):
        return as_tensors(inputs(batch))
    keys = [inputs] if isinstance(inputs, (str, int)) else list(inputs)
    if len(keys) == 1 and isinstance(keys[0], int):
        part = pick_part(batch, keys[0])
        return as_tensors(part) if _is_call(part) else (part,)
    if isinstance(inputs, str):
        return (pick_part(batch, inputs),)
    if all(isinstance(key, str) for key in keys):
        return as_tensors({str(key): _part(batch, key) for key in keys})
    return tuple(pick_part(batch, key) for key in keys)


def pick_part(batch: Any, key: str | int) -> Any:
    """One part of a batch; an array or a list of numbers as a tensor.

    Raises:
        InputError: the batch has no such part.
    """
    return _as_tensor(_part(batch, key))


def _is_call(part: Any) -> bool:
    """Whether a part of a batch holds several inputs."""
    is_sequence = isinstance(part, (tuple, list)) and len(part) > 0
    return isinstance(part, Mapping) or (
        is_sequence and all(isinstance(value, (torch.Tensor, np.ndarray)) for value in part)
    )


def as_tensors(batch: Any) -> Any:
    """A batch with NumPy arrays, and lists of numbers under keys, as tensors.

    Data sets of Hugging Face give such lists where no format is set.

    >>> as_tensors({"ids": [[1, 2], [3, 4]], "text": "a"})
    {'ids': tensor([[1, 2],
            [3, 4]]), 'text': 'a'}
    """
    if isinstance(batch, Mapping):
        return {key: _as_tensor(value) for key, value in batch.items()}
    if isinstance(batch, (tuple, list)):
        parts = [_as_array(value) for value in batch]
        return type(batch)(parts) if type(batch) in (tuple, list) else tuple(parts)
    return _as_array(batch)


def _as_tensor(value: Any) -> Any:
    if isinstance(value, list) and all(isinstance(v, (int, float, list)) for v in value):
        with suppress(ValueError, TypeError):  # rows of different lengths, or of texts
            return torch.tensor(value)
    return _as_array(value)


def _as_array(value: Any) -> Any:
    if not isinstance(value, np.ndarray):
        return value
    try:
        return torch.from_numpy(value)
    except TypeError as error:
        raise InputError(
            f"a batch holds a NumPy array of {value.dtype}, which torch has no dtype for",
            fix="give numbers; leave texts out with inputs=…",
        ) from error


def bind_batch(
    capture: Capture, batch: Any, inputs: InputPick | None = None, *, call: str = ""
) -> list[Any]:
    """A batch as the checked inputs of a captured call.

    Args:
        capture: of the call.
        batch: as `calibrate` takes it.
        inputs: what of it the model takes.
        call: the function that the user called, for the error.

    Raises:
        InputError: it does not fit; where leaving labels out would help, the fix says which
            `inputs=` does.
    """
    try:
        return capture.bind(*as_call(pick_inputs(batch, inputs)))
    except InputError as error:
        if inputs is None and (pick := suggest_pick(capture, batch)):
            shown = f"{call}(…, {pick})" if call else pick
            fix = f"{shown}: the rest of the batch is no input of the model"
            raise InputError(error.what, fix=fix) from error
        raise


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
    if isinstance(batch, (torch.Tensor, np.ndarray)) and key == 0:
        return batch  # the only input already, not rows of it
    try:
        if isinstance(batch, (torch.Tensor, np.ndarray)):
            raise IndexError
        return batch[key]
    except (KeyError, IndexError, TypeError) as error:
        what = f"a {type(batch).__name__}"
        if isinstance(batch, Mapping):
            what += f" with {near(str(key), map(str, batch))}"
        elif isinstance(batch, (tuple, list)):
            what += f" of {len(batch)} parts"
        raise InputError(
            f"inputs={key!r} is not in the batch, which is {what}",
            fix="give a key of the dict, an index of the tuple, or a function of the batch",
        ) from error
