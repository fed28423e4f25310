"""Pick the model's inputs from the batches of a data loader.

A loader made for training yields labels too: `(images, labels)`, or a dict with a `labels` key.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch

from pt2e_quant.core.capture import Capture
from pt2e_quant.core.errors import ConfigError, InputError, near

InputPick: TypeAlias = str | int | Sequence[str | int] | Callable[[Any], Any]
"""The parts of a batch that the model takes.

A key or an index: that part is the only input. An index whose part is a dict, or a tuple or list of
tensors, as of `((image, mask), label)`: its parts are the inputs. Several keys: keyword arguments
of these names. Several indices: positional arguments. A function: of the batch, returns a batch as
`calibrate` takes it.
"""

_PICKS = "inputs= takes a key of a dict, an index of a tuple, several of them, or a function"


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
        return as_tensors(_called(inputs, batch))
    keys = _keys(inputs)
    if len(keys) == 1 and isinstance(keys[0], int):
        part = pick_part(batch, keys[0])
        return as_tensors(part) if _is_call(part) else (part,)
    if isinstance(inputs, str):
        return (pick_part(batch, inputs),)
    if all(isinstance(key, str) for key in keys):
        return as_tensors({str(key): _part(batch, key) for key in keys})
    return tuple(pick_part(batch, key) for key in keys)


def _called(inputs: Callable[[Any], Any], batch: Any) -> Any:
    try:
        found = inputs(batch)
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise InputError(
            f"the function inputs= failed on a batch, {_described(batch)}: "
            f"{type(error).__name__}: {error}",
            fix="inputs=lambda batch: batch[0], or what else holds the inputs",
        ) from error
    if found is None:
        raise InputError("the function inputs= returned None", fix="return the inputs of a call")
    return found


def _described(batch: Any) -> str:
    if isinstance(batch, Mapping):
        return f"a {type(batch).__name__} of {', '.join(map(str, batch))}"
    parts = f" of {len(batch)} parts" if isinstance(batch, (tuple, list)) else ""
    return f"a {type(batch).__name__}{parts}"


def _keys(inputs: str | int | Sequence[str | int]) -> list[str | int]:
    keys = [inputs] if isinstance(inputs, (str, int)) else inputs
    is_sequence = isinstance(keys, Sequence) and len(keys) > 0
    if not is_sequence or not all(isinstance(key, (str, int)) for key in keys):
        raise ConfigError(f"inputs={inputs!r} picks no part of a batch", fix=_PICKS)
    return list(keys)


def pick_part(batch: Any, key: str | int, argument: str = "inputs") -> Any:
    """One part of a batch; an array or a list of numbers as a tensor.

    Args:
        batch: a tensor, a mapping, a tuple or a list.
        key: a key or an index.
        argument: whose it is, for the error.

    Raises:
        InputError: the batch has no such part.
    """
    return _as_tensor(_part(batch, key, argument))


def _is_call(part: Any) -> bool:
    """True if a part of a batch holds several inputs."""
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
    if isinstance(value, list) and value:
        parts = [_as_array(np.asarray(v) if isinstance(v, np.generic) else v) for v in value]
        # A model may take a list of tensors, but none of numbers: a list of labels is one tensor.
        if all(isinstance(v, torch.Tensor) and not v.dim() for v in parts):
            return torch.stack(parts)
        return parts
    return _as_array(value)


Returned = TypeVar("Returned")


def call_with(run: Callable[[Any], Returned], batch: Any) -> Returned:
    """Return `run` of a batch; if it refuses the batch, of another form of it.

    Data sets of Hugging Face give an image of each sample in a list: `{"pixels": [tensor, …]}`.
    Some models take such lists as they are, and only running them tells. Nor is known before
    whether a dict holds the arguments of a call, or is the one argument of a model.

    Raises:
        InputError, TypeError, AttributeError, ValueError: of the batch as it is, if `run` takes no
            form of it.
    """
    try:
        return run(batch)
    except (InputError, TypeError, AttributeError, ValueError):
        stacked = _stacked(batch)
        if stacked is not None:
            return run(stacked)
        if not isinstance(batch, Mapping):
            raise
        with suppress(InputError, TypeError, AttributeError, ValueError):
            return run((batch,))
        raise


def _stacked(batch: Any) -> Any:
    """A batch with its lists of tensors of one shape as tensors; None if it has no such list."""
    if isinstance(batch, Mapping):
        values: Sequence[Any] = list(batch.values())
    else:
        values = batch if isinstance(batch, (tuple, list)) else [batch]
    found = [_one_tensor(value) for value in values]
    if all(a is b for a, b in zip(values, found, strict=True)):
        return None
    return dict(zip(batch, found, strict=True)) if isinstance(batch, Mapping) else tuple(found)


def _one_tensor(value: Any) -> Any:
    if not isinstance(value, list) or not all(isinstance(v, torch.Tensor) for v in value):
        return value
    return torch.stack(value) if len({(v.shape, v.dtype) for v in value}) == 1 else value


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
    picked = pick_inputs(batch, inputs)
    try:
        return call_with(lambda taken: capture.bind(*as_call(taken)), picked)
    except InputError as error:
        if inputs is not None:
            raise told_pick(inputs, error) from error
        if fix := suggest_fix(capture, batch, call):
            raise InputError(error.what, fix=fix) from error
        raise


def told_pick(inputs: InputPick, error: InputError) -> InputError:
    """The error that says that what `inputs` picks does not fit."""
    shown = "…" if callable(inputs) else repr(inputs)
    return InputError(f"what inputs={shown} picks does not fit: {error.what}", fix=error.fix)


def suggest_fix(capture: Capture, batch: Any, call: str = "") -> str:
    """Return the fix for a refused batch: the `inputs=` that makes it fit.

    Args:
        capture: of the call.
        batch: what was refused.
        call: the function that the user called.

    Returns:
        A text; "" where the batch has no part too many, and no name that the model has not.
    """
    for pick in _candidates(capture, batch):
        try:
            call_with(lambda taken: capture.bind(*as_call(taken)), pick_inputs(batch, pick))
        except InputError:
            continue
        shown = f"inputs={pick!r}"
        shown = f"{call}(…, {shown})" if call else shown
        if len(batch) == 1:
            return f"{shown}: it is the only input of the model, under another name"
        return f"{shown}: the rest of the batch is no input of the model"
    names = capture.arg_names
    if isinstance(batch, Mapping):
        if not batch.keys() - set(names):
            return ""
        parts = ", ".join(f'"{n}": batch["{n if n in batch else "…"}"]' for n in names)
        return f"inputs=lambda batch: {{{parts}}} tells what the model takes of a batch"
    is_long = isinstance(batch, (tuple, list)) and len(batch) > len(names)
    return _PICKS if is_long else ""


def _candidates(capture: Capture, batch: Any) -> list[InputPick]:
    if isinstance(batch, Mapping):
        names = [name for name in capture.arg_names if name in batch]
        if 0 < len(names) < len(batch):
            return [names]
        return [key for key in batch if isinstance(key, str)] if len(capture.arg_names) == 1 else []
    if isinstance(batch, (tuple, list)):
        parts = len(batch)
        single: list[InputPick] = list(range(parts)) if parts > 1 else []
        return [*single, *(list(range(count)) for count in range(2, parts))]
    return []


def _part(batch: Any, key: str | int, argument: str = "inputs") -> Any:
    if isinstance(batch, (torch.Tensor, np.ndarray)) and key == 0:
        return batch  # the only input already, not rows of it
    try:
        if isinstance(batch, (torch.Tensor, np.ndarray)):
            raise IndexError
        return batch[key]
    except (KeyError, IndexError, TypeError) as error:
        what = _described(batch)
        if isinstance(batch, Mapping):
            what = f"a {type(batch).__name__}: {near(str(key), map(str, batch))}"
        raise InputError(
            f"{argument}={key!r} is not in the batch, which is {what}",
            fix=_PICKS.replace("inputs", argument),
        ) from error
