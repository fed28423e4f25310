"""evaluate: a metric of any form of a model over a data loader."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.fx import GraphModule

from pt2e_quant.analysis.graph_side import GraphSide
from pt2e_quant.analysis.metric import Metric, MetricSum, split_batch
from pt2e_quant.analysis.open_side import open_file
from pt2e_quant.backends.artifact import Artifact, result_builder
from pt2e_quant.core.errors import ConfigError, InputError
from pt2e_quant.core.progress import show_progress
from pt2e_quant.core.read_capture import call_graph, capture_of
from pt2e_quant.core.unlift import graph_module_of
from pt2e_quant.flow.calibrate.calibrate import check_batches, preserve_buffers
from pt2e_quant.flow.calibrate.pick_inputs import (
    InputPick,
    as_call,
    call_with,
    suggest_fix,
    told_pick,
)
from pt2e_quant.flow.calibrate.sample import copied
from pt2e_quant.flow.prepare.prepared import PREPARED_KEY
from pt2e_quant.tensors.run_batches import check_call

Run: TypeAlias = Callable[[Sequence[Any], Mapping[str, Any]], Any]


def evaluate(
    model: nn.Module | ExportedProgram | Artifact | str | Path,
    loader: Iterable[Any],
    metric: Metric,
    *,
    inputs: InputPick | None = None,
    targets: InputPick | None = None,
    progress: bool = True,
) -> float:
    """The metric of a model over a data loader.

    Args:
        model: a module (run in eval mode), a program of torch.export, a prepared, converted or
            integer graph, an artifact, or the path of a file that an artifact saved.
        loader: batches of tensors, NumPy arrays, pairs of images and labels, dicts.
        metric: a function of a batch's outputs and targets, whose mean over samples is taken; or
            an object with `update` and `compute`, as torchmetrics has them.
        inputs: what of each batch the model takes, as `calibrate` has it. By default the first of
            a pair, and all of a dict but its labels.
        targets: what the metric takes besides the outputs: a key, an index, or a function. By
            default the second of a pair, and "labels" of a dict.
        progress: show a progress bar on a terminal.

    Raises:
        ConfigError: there is no batch, or the model is something else.
        InputError: a batch does not fit; names the batch and the argument that makes it fit.
    """
    check_batches(loader, call="evaluate(model, {}, metric)")
    opened = open_file(model) if isinstance(model, (str, Path)) else model
    run = _runner(opened)
    sums = MetricSum(metric)
    count = 0
    with torch.no_grad():
        for batch in show_progress(loader, "evaluating", enabled=progress):
            taken, wanted = split_batch(batch, inputs, targets)
            try:
                outputs = call_with(lambda taken: run(*as_call(taken)), taken)
            except InputError as error:
                raise _told(error, opened, batch, count, inputs) from error
            sums.add(outputs, wanted)
            count += 1
    if not count:
        raise ConfigError(
            "there is no batch to evaluate on",
            fix="give at least one batch; an iterator that was used up before gives none",
        )
    return sums.value()


def _runner(model: object) -> Run:
    """Return a function that runs a call of a model; its buffers are reset for each batch."""
    if isinstance(model, Artifact):
        artifact = model

        def run(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
            artifact.reset()
            return artifact.run(*args, **kwargs)

        return run
    if isinstance(model, ExportedProgram):
        model = graph_module_of(model)
    if isinstance(model, GraphModule):
        return _graph_runner(model)
    if isinstance(model, nn.Module):
        module = model
        return lambda args, kwargs: _in_eval(module, args, kwargs)
    raise ConfigError(
        f"evaluate takes a form of a model, found {type(model).__name__}",
        fix="give a module, a program of torch.export, a graph, an artifact, or a file's path",
    )


def _graph_runner(gm: GraphModule) -> Run:
    capture = capture_of(gm)
    if PREPARED_KEY in gm.meta:  # its observers are not to see this data
        side, build = GraphSide(gm, ""), result_builder(capture.out_spec)
        return lambda args, kwargs: build(
            side.run(capture.bind(args, kwargs), lambda site, value: None)
        )

    def run(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        with preserve_buffers(gm, capture):
            return call_graph(gm, capture, copied(capture.bind(args, kwargs)))

    return run


def _in_eval(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    check_call(module, args, kwargs)
    was_training = {m: m.training for m in module.modules()}
    try:
        return module.eval()(*args, **kwargs)
    finally:
        for part, mode in was_training.items():
            part.training = mode


def _told(
    error: InputError, model: object, batch: Any, index: int, inputs: InputPick | None
) -> InputError:
    """An error that names the batch, and the argument that leaves out what the model refuses."""
    capture = model.capture if isinstance(model, Artifact) else None
    if isinstance(model, ExportedProgram):
        model = graph_module_of(model)
    if isinstance(model, GraphModule):
        capture = capture_of(model)
    fix = ""
    if inputs is not None:
        error = told_pick(inputs, error)
    elif capture is not None:
        fix = suggest_fix(capture, batch, "evaluate")
    return InputError(f"evaluation batch {index}: {error.what}", fix=fix or error.fix)
