"""Named arrays to batches: array names are input names, the first axis holds the samples."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from pt2e_quant.command_line.data_file import Data
from pt2e_quant.core.capture import Capture
from pt2e_quant.core.errors import InputError
from pt2e_quant.core.input_info import InputInfo, InputKind
from pt2e_quant.core.size_expression import evaluate_size

_NUMBERED = re.compile(r"arr_\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Batches:
    """Batches for one program.

    Args:
        batches: as `calibrate` takes them; a list where they came from arrays.
        unused: names of arrays that are no input of the program.
    """

    batches: Iterable[Any]
    unused: tuple[str, ...] = ()


def make_batches(
    data: Data,
    capture: Capture,
    *,
    batch_size: int | None = None,
    max_batches: int | None = None,
) -> Batches:
    """Split arrays into the calls that a program takes; every call is checked here.

    An array with the input's number of dimensions is cut along its first axis, into pieces of
    the captured size, or of `batch_size` where that dimension is dynamic. An array with one
    dimension more holds one whole input per entry of its first axis.

    Args:
        data: of `read_data`.
        capture: the call of the program.
        batch_size: size of a dynamic first dimension; the captured sample's by default.
        max_batches: use only so many.

    Raises:
        InputError: an array is missing, or does not fit; before anything is run.
    """
    if data.batches is not None:
        if batch_size is not None:
            raise InputError(
                f"{data.label} gives whole batches, so --batch-size says nothing",
                fix="make the batches of the size you want, or give named arrays",
            )
        return Batches(batches=islice(data.batches, max_batches) if max_batches else data.batches)
    arrays, unused = _match(data, capture)
    symbols = _batch_symbols(capture, batch_size)
    columns: dict[int, Sequence[Any]] = {}
    for at, info in enumerate(capture.inputs):
        if info.kind is InputKind.LITERAL:
            continue
        columns[at] = _pieces(data.label, info, arrays[info.path], symbols)
    calls = _calls(data.label, capture, columns, max_batches)
    for index, call in enumerate(calls):
        try:
            capture.bind((), call)
        except InputError as error:
            raise InputError(f"{data.label}, batch {index}: {error.what}", fix=error.fix) from error
    return Batches(batches=calls, unused=unused)


def dotted(path: str) -> str:
    """An input's path as a file writes it: `z['q'][0]` is `z.q.0`.

    >>> dotted("z['q'][0]")
    'z.q.0'
    """
    return re.sub(r"\[['\"]?([^\]'\"]*)['\"]?\]", r".\1", path).strip(".")


def _match(data: Data, capture: Capture) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Array by input path; arrays that no input took."""
    wanted = [i.path for i in capture.inputs if i.kind is not InputKind.LITERAL]
    names = list(data.arrays)
    if len(wanted) == 1 and len(names) == 1:
        return {wanted[0]: data.arrays[names[0]]}, ()
    if len(names) == len(wanted) and all(_NUMBERED.fullmatch(n) for n in names):
        return dict(zip(wanted, data.arrays.values(), strict=True)), ()
    found: dict[str, Tensor] = {}
    for path in wanted:
        for name in (path, dotted(path)):
            if name in data.arrays:
                found[path] = data.arrays[name]
    if missing := [dotted(path) for path in wanted if path not in found]:
        raise InputError(
            f"{data.label} has no array for input {', '.join(missing)}: "
            f"it holds {', '.join(names)}",
            fix=f"name the arrays as the model's inputs: {', '.join(map(dotted, wanted))}",
        )
    used = {*found, *map(dotted, found)}
    return found, tuple(n for n in names if n not in used)


def _batch_symbols(capture: Capture, batch_size: int | None) -> dict[str, int]:
    """Sizes of the symbols that are an input's first dimension."""
    first = [i.shape[0] for i in capture.inputs if i.shape]
    symbols = {s for s in first if isinstance(s, str) and s in capture.dims}
    if batch_size is None:
        return {s: capture.dims[s].hint for s in symbols}
    if not symbols:
        sizes = sorted({s for s in first if isinstance(s, int)})
        if sizes != [batch_size]:
            raise InputError(
                f"--batch-size {batch_size}: this program was captured with fixed sizes, "
                f"{', '.join(map(str, sizes))} in the first dimension",
                fix="leave --batch-size out, or export with a dynamic first dimension: "
                'dynamic_shapes={"x": {0: torch.export.Dim.AUTO}}',
            )
    for symbol in symbols:
        limits = capture.dims[symbol]
        if batch_size < limits.minimum or batch_size > (limits.maximum or batch_size):
            raise InputError(
                f"--batch-size {batch_size}: the program was captured for "
                f"{limits.minimum} to {limits.maximum or 'any'}",
                fix="choose a size in that range, or export with a wider one",
            )
    return dict.fromkeys(symbols, batch_size)


def _pieces(
    label: str, info: InputInfo, array: Tensor, symbols: Mapping[str, int]
) -> Sequence[Any]:
    if info.kind is InputKind.SYMBOL:
        return _integers(label, info, array)
    dtype = str(array.dtype).removeprefix("torch.")
    if dtype != info.dtype:
        raise InputError(
            f'{label}: the array for input "{info.path}" has dtype {dtype}, '
            f"the program was captured with {info.dtype}",
            fix=f'save it in that type: array.astype("{info.dtype}")',
        )
    rank = len(info.shape)
    if array.dim() == rank + 1:
        return array.unbind(0)
    if array.dim() != rank or rank == 0:
        shape = ", ".join(str(s) for s in info.shape)
        raise InputError(
            f'{label}: the array for input "{info.path}" has shape {tuple(array.shape)}, '
            f"one call takes ({shape})",
            fix="put the samples on the first axis"
            + (f": (samples, {', '.join(str(s) for s in info.shape[1:])})" if rank > 1 else ""),
        )
    size = info.shape[0]
    step = size if isinstance(size, int) else evaluate_size(size, symbols) or 1
    if len(array) == 0:
        raise InputError(
            f'{label}: the array for input "{info.path}" is empty: shape {tuple(array.shape)}',
            fix="give at least one sample",
        )
    left = len(array) % step
    if left and isinstance(size, int):
        raise InputError(
            f'{label}: {len(array)} samples for input "{info.path}" do not divide into batches '
            f"of {step}, the size the program was captured with",
            fix=f"leave out the last {left}, or export with a dynamic first dimension",
        )
    return torch.split(array, step)


def _integers(label: str, info: InputInfo, array: Tensor) -> list[int]:
    if array.dim() != 1 or array.is_floating_point():
        raise InputError(
            f'{label}: input "{info.path}" is an integer, its array has shape '
            f"{tuple(array.shape)} and dtype {array.dtype}",
            fix="give one integer a call, as an array of one dimension",
        )
    return [int(v) for v in array]


def _calls(
    label: str,
    capture: Capture,
    columns: Mapping[int, Sequence[Any]],
    max_batches: int | None,
) -> list[dict[str, Any]]:
    """One dict of keyword arguments a call."""
    counts = {dotted(capture.inputs[at].path): len(pieces) for at, pieces in columns.items()}
    if len(set(counts.values())) > 1:
        listed = ", ".join(f"{count} for {name}" for name, count in counts.items())
        raise InputError(
            f"{label} gives different numbers of batches: {listed}",
            fix="give every input the same samples; an input that has no sample dimension "
            "gets one more axis in front, with one entry a call",
        )
    count = min(counts.values(), default=0)
    calls = []
    for index in range(count if max_batches is None else min(count, max_batches)):
        leaves = [
            columns[at][index] if at in columns else info.value
            for at, info in enumerate(capture.inputs)
        ]
        calls.append(dict(zip(capture.arg_names, capture.positional(leaves), strict=True)))
    return calls
