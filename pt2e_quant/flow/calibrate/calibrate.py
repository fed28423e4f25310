"""calibrate: run data through a prepared graph so that its observers see it."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from pt2e_quant.core.capture import Capture
from pt2e_quant.core.errors import CalibrationError, InputError
from pt2e_quant.core.progress import show_progress
from pt2e_quant.core.qdq import required_attribute
from pt2e_quant.core.read_capture import capture_of
from pt2e_quant.flow.calibrate.input_ranges import note_ranges
from pt2e_quant.flow.calibrate.name_stops import find_stop, naming_stops
from pt2e_quant.flow.calibrate.pick_inputs import InputPick, bind_batch
from pt2e_quant.flow.calibrate.sample import SAMPLE_KEY, Sample, copied
from pt2e_quant.flow.prepare.prepared import observers_of, prepared_graphs, prepared_state
from pt2e_quant.graph.alias import written_inputs


def calibrate(
    prepared: GraphModule,
    batches: Iterable[Any],
    *,
    inputs: InputPick | None = None,
    progress: bool = True,
) -> GraphModule:
    """Run batches through a prepared graph.

    Args:
        prepared: of `prepare_pt2e`.
        batches: any iterable; a dict is one call's keyword arguments, a tuple or list its
            positional ones, a tensor its only one. Each is checked before it is run.
        inputs: what of each batch the model takes, where a loader gives labels too: a key, an
            index, several of one kind, or a function of the batch. None for the whole batch.
        progress: show a progress bar on a terminal.

    Returns:
        The same graph. Buffers that a call writes are as they were before.

    Raises:
        InputError: a batch does not fit the captured graph.
        CalibrationError: there is no batch, an operator cannot take one, or NaN or infinity came
            up; names node and batch.
    """
    prepared_state(prepared)
    check_batches(batches)
    capture = capture_of(prepared)
    watched = [pair for graph in prepared_graphs(prepared) for pair in observers_of(graph)]
    shown = show_progress(batches, "calibrating", enabled=progress)
    count = 0
    is_writing = bool(written_inputs(prepared.graph))  # what it is given stays as it is
    prepared.meta.pop(SAMPLE_KEY, None)
    with torch.no_grad(), preserve_buffers(prepared, capture):
        for count, batch in enumerate(shown, start=1):
            leaves = checked_call(capture, batch, inputs, count - 1)
            given = copied(leaves) if is_writing else leaves
            values = capture.positional(given)
            with naming_stops(partial(find_stop, prepared, values), count - 1):
                outputs = prepared(*values)
            # Where the graph writes neither buffers nor inputs, its hook has kept the first call.
            if SAMPLE_KEY not in prepared.meta:
                prepared.meta[SAMPLE_KEY] = Sample.keep(leaves, outputs)
            note_ranges(prepared, leaves)
            check_finite(watched, count - 1)
    if count == 0:
        raise CalibrationError(
            "the calibration data is empty: no batch was run",
            fix="give at least one batch; an iterator that was used up before gives none",
        )
    return prepared


def check_batches(batches: object, call: str = "calibrate(prepared, {})") -> None:
    """Refuse anything but an iterable of batches.

    Args:
        batches: what was given.
        call: what the user called, "{}" where the batches stand.
    """
    # A loader of old style has __getitem__ alone.
    is_iterable = isinstance(batches, Iterable) or hasattr(batches, "__getitem__")
    is_function = callable(batches) and not isinstance(batches, Tensor)
    if isinstance(batches, (Tensor, np.ndarray, Mapping, str)) or not is_iterable:
        raise InputError(
            f"batches must be an iterable of batches, found one {type(batches).__name__}",
            fix=call.format("function()" if is_function else "[batch]"),
        )


def checked_call(capture: Capture, batch: Any, inputs: InputPick | None, index: int) -> list[Any]:
    """The leaves of a batch, in placeholder order.

    Raises:
        InputError: it does not fit the captured graph.
    """
    try:
        return bind_batch(capture, batch, inputs, call="calibrate")
    except InputError as error:
        raise InputError(f"calibration batch {index}: {error.what}", fix=error.fix) from error


def check_finite(watched: Iterable[tuple[Node, Any]], index: int) -> None:
    """Raise a CalibrationError for the first observer that saw NaN or infinity in a batch."""
    for node, observer in watched:
        check = getattr(observer, "check_finite", None)
        if check is None:
            continue
        try:
            check()
        except CalibrationError as error:
            source = node.args[0]
            raise CalibrationError(
                f"calibration batch {index}: {error.what}",
                node=source if isinstance(source, Node) else node,
                fix=error.fix,
            ) from error


@contextmanager
def preserve_buffers(gm: GraphModule, capture: Capture) -> Iterator[None]:
    """Restore every buffer that the graph writes when the block ends."""
    buffers = [required_attribute(gm, name) for name in capture.mutated_buffers]
    kept = [b.detach().clone() for b in buffers]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in zip(buffers, kept, strict=True):
                buffer.copy_(value)
