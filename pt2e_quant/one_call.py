"""The whole road in one call: model to artifact."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from pt2e_quant.accelerate.pause_gc import collect_new
from pt2e_quant.backends.artifact import Artifact, Verify
from pt2e_quant.backends.gate import choose_sample
from pt2e_quant.backends.registry import get
from pt2e_quant.backends.sample_run import run_graph
from pt2e_quant.backends.target.backend import Backend
from pt2e_quant.backends.target.recipe_file import RecipeName
from pt2e_quant.core.errors import CalibrationError, InputError
from pt2e_quant.core.export import export
from pt2e_quant.core.max_sizes import MaxSizes, limit_graph
from pt2e_quant.core.provenance import record_named
from pt2e_quant.core.read_capture import capture_of
from pt2e_quant.core.unlift import graph_module_of
from pt2e_quant.flow.annotate.table_quantizer import TableQuantizer
from pt2e_quant.flow.calibrate.calibrate import preserve_buffers
from pt2e_quant.flow.calibrate.calibrate_by_block import run_calibration
from pt2e_quant.flow.calibrate.pick_inputs import InputPick
from pt2e_quant.flow.calibrate.sample import sqnr_db
from pt2e_quant.flow.convert.convert_pt2e import convert_pt2e
from pt2e_quant.flow.prepare.prepare_pt2e import prepare_pt2e
from pt2e_quant.flow.report.worst_tensors import warn_if_low
from pt2e_quant.passes.algorithms.algorithm import Algorithm
from pt2e_quant.tensors.graphs.graph import (
    prepare_stored,
    quantized_weights,
    real_weights,
    stored_quantizer,
)

if TYPE_CHECKING:
    from pt2e_quant.analysis.metric import Metric

_ADVICE = ("For ", "If you suspect", "The error above occurred")

_DATA = "quantize(model, args, backend=…, calibration_data=batches)"


def quantize(
    model: nn.Module | ExportedProgram,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic_shapes: Any = None,
    calibration_data: Iterable[Any] | None = None,
    backend: str | Backend,
    recipe: RecipeName | None = "int8",
    inputs: InputPick | None = None,
    algorithms: Sequence[str | Algorithm] = (),
    effort: str | None = None,
    resume: str | Path | None = None,
    search: str | None = None,
    pad_groups: bool = False,
    max_sizes: MaxSizes | None = None,
    strict: bool = True,
    verify: Verify = True,
    validate: bool = False,
    record: str | None = None,
    measure: bool = False,
    allow_slower: bool = False,
    accuracy_drop: float | None = None,
    metric: "Metric | None" = None,
    progress: bool = True,
) -> Artifact:
    """Export, quantize and lower a model; returns the artifact: `run`, `save`, `report`.

    Args:
        model: a float model, or a program of torch.export. Its tensors are never written.
        args: example positional inputs; not needed for an exported program.
        kwargs: example keyword inputs.
        dynamic_shapes: as torch.export.export takes it.
        calibration_data: any iterable of batches; a dict is keyword arguments, a tuple or list
            positional ones, a tensor the only one. None for weight-only and dynamic recipes.
        backend: "xnnpack", "onnx", "cpu", "cuda", or one of an entry point; or a backend itself,
            as `with_kernels` gives it.
        recipe: of that backend, a .toml or `tune(…).recipe`; None lowers `quantize_`'s codes.
        inputs: what of each batch the model takes, as `calibrate` has it: 0 of (images, labels).
        algorithms: as `prepare_pt2e` takes them: `["gptq"]`. Most of them need calibration data.
        effort: what is tried out for the ranges of activations, as `prepare_pt2e` takes it.
        resume: a folder for the state of a calibration block by block (`calibrate_by_block`).
        search: how weights' scales are found, "min_max", "mse" or "hqq"; None as the recipe says.
        pad_groups: pad linears with zero columns where groups do not divide them; else refuse them.
        max_sizes: the largest size of dynamic dimensions that the export has not bounded, by input
            and dimension: {"x": {0: 64}}. A .pte plans its memory for them.
        strict: make errors of what the report would warn of.
        verify: run the artifact against the quantized graph at several sizes; "process": also in a
            new process, so that a crash of the runtime is an error.
        validate: compare the graph before and after each pass of the lowering; name what differs.
        record: what the file keeps of how each tensor was quantized: "full", "brief" or "none";
            None keeps the most that takes at most 4 KB and 3 % of the constants.
        measure: time the artifact against the float program here; warn where it is slower.
        allow_slower: quantize also what measured slower than float, as `Backend.allowing_slower`.
        accuracy_drop: by how much `metric` may fall on the calibration data (see `pq.tune`):
            operators that cost too much get more bits or stay float.
        metric: of outputs and targets; None for the cosine with the float model's outputs.
        progress: show a progress bar on a terminal.

    Raises:
        Pt2eQuantError: naming what is wrong, where, and the fix.

    Warns:
        Pt2eQuantWarning: the graph is below 15 dB SQNR from float; or slower, if measured.
    """
    target = get(backend) if isinstance(backend, str) else backend
    target = target.allowing_slower() if allow_slower else target
    target.require_extra()
    told: dict[str, Any] = {"strict": strict, "verify": verify, "validate": validate}
    told |= {"record": record_named(record), "measure": measure}
    exported = (args, kwargs, dynamic_shapes)
    if accuracy_drop is not None or metric is not None:
        others: dict[str, Any] = {"search": search, "pad_groups": pad_groups, "effort": effort}
        others |= {"max_sizes": max_sizes, "resume": resume, "record": record, "measure": measure}
        base = (recipe, target, algorithms, others)
        goal = (calibration_data, accuracy_drop, metric)
        return _to_accuracy(model, exported, base, goal, (inputs, verify, progress))
    how = (algorithms, effort, strict, search, pad_groups)
    program, prepared = _prepared(target, model, exported, recipe, how)
    limit_graph(prepared, max_sizes or {})
    prepared = run_calibration(prepared, calibration_data, resume, inputs=inputs, progress=progress)
    with asking_for_data(recipe, _DATA, is_given=calibration_data is not None or bool(algorithms)):
        converted = convert_pt2e(prepared, progress=progress)
    # Calibration keeps a sample; without it, the user's inputs are better than noise.
    sample = args if calibration_data is None and args and not kwargs else None
    return _lowered(target, program, converted, sample, told)


@contextmanager
def asking_for_data(recipe: RecipeName | None, how: str, *, is_given: bool) -> Iterator[None]:
    """Say that a recipe needs data, where observers miss it.

    Args:
        recipe: its name.
        how: to give data, for the fix.
        is_given: whether there is data, or an algorithm was asked for, which says itself that it
            needs some. Errors stay as they are.

    Raises:
        CalibrationError: what runs inside needs data.
    """
    try:
        yield
    except CalibrationError as error:
        if is_given:
            raise
        named = f'recipe "{recipe}"' if isinstance(recipe, str) else "the recipe"
        raise CalibrationError(
            f"{named} needs calibration data, and none was given: {error.what}",
            fix=f"{how}; recipes with w4, w8 or dynamic in the name need none",
        ) from error


def _lowered(
    target: Backend,
    program: ExportedProgram,
    converted: GraphModule,
    sample: Sequence[Any] | None,
    told: Mapping[str, Any],
) -> Artifact:
    """The artifact of a converted graph; warns where that is far from its program."""
    artifact = target.lower(converted, sample, **told)
    if told["verify"]:
        if sample is not None:
            _measure(program, converted, sample, artifact)
        warn_if_low(converted, choose_sample(converted, sample), artifact.report.sqnr_float_db)
    return artifact


def _prepared(
    target: Backend,
    model: nn.Module | ExportedProgram,
    exported: tuple[Any, Any, Any],
    recipe: RecipeName | None,
    how: tuple[Sequence[str | Algorithm], str | None, bool, str | None, bool],
) -> tuple[ExportedProgram, GraphModule]:
    """The program, and its prepared graph."""
    algorithms, effort, strict, search, pad_groups = how
    if recipe is None:
        is_asked = bool(algorithms or effort or search or pad_groups)
        return _prepare_stored(target, model, exported, is_asked=is_asked)
    quantizer = _quantizer(target, recipe, search, pad_groups=pad_groups)
    program = capture_model(_float_model(model), *exported)
    options: dict[str, Any] = {"algorithms": algorithms, "effort": effort, "strict": strict}
    return program, prepare_pt2e(program, quantizer, **options)


def _to_accuracy(
    model: nn.Module | ExportedProgram,
    exported: tuple[Any, Any, Any],
    base: tuple[RecipeName | None, Backend, Sequence[str | Algorithm], Mapping[str, Any]],
    goal: tuple[Iterable[Any] | None, float | None, "Metric | None"],
    shown: tuple[InputPick | None, Verify, bool],
) -> Artifact:
    """The artifact of a search, which begins with the recipe of `base`."""
    # It calls this file, and needs scipy, an extra.
    from pt2e_quant.analysis.tune import base_recipe, quantize_to_accuracy

    how: dict[str, Any] = dict(zip(("inputs", "verify", "progress"), shown, strict=True))
    return quantize_to_accuracy(model, exported, base_recipe(*base), base[1], *goal, **how)


def _prepare_stored(
    target: Backend,
    model: nn.Module | ExportedProgram,
    exported: tuple[Any, Any, Any],
    *,
    is_asked: bool,
) -> tuple[ExportedProgram, GraphModule]:
    """A module with quantized weights as a program with float ones, and prepared for its codes."""
    if is_asked:
        raise InputError(
            "recipe=None takes a module's codes as they are: no algorithms, search or padding",
            fix="quantize_(module, …) takes them",
        )
    if isinstance(model, ExportedProgram):
        raise InputError(
            "recipe=None takes a module that quantize_ has quantized, found a program",
            fix="quantize(module, args, backend=…, recipe=None)",
        )
    with real_weights(model) as stored:
        quantizer = stored_quantizer(target, stored)
        program = capture_model(model, *exported)
        return program, prepare_stored(program, quantizer, stored)


def _quantizer(
    target: Backend, recipe: RecipeName, search: str | None, *, pad_groups: bool
) -> TableQuantizer:
    quantizer = target.quantizer(recipe)
    if search is not None:
        quantizer.with_search(search)
    return quantizer.pad_groups() if pad_groups else quantizer


def _float_model(model: nn.Module | ExportedProgram) -> nn.Module | ExportedProgram:
    """The model, if none of its weights is quantized already."""
    if isinstance(model, nn.Module) and (found := quantized_weights(model)):
        raise InputError(
            f"{next(iter(found))} is quantized already",
            fix="quantize(module, …, recipe=None) lowers the codes it has",
        )
    return model


def _measure(
    program: ExportedProgram, converted: GraphModule, args: Sequence[Any], artifact: Artifact
) -> None:
    """Compare the quantized graph with the float model on the example inputs."""
    model = graph_module_of(program)
    copies = pytree.tree_map_only(Tensor, Tensor.clone, tuple(args))
    with torch.no_grad(), preserve_buffers(model, capture_of(converted)):
        expected = pytree.tree_leaves(model(*copies))
    found = run_graph(converted, choose_sample(converted, args))
    artifact.report.sqnr_float_db = sqnr_db(expected, found)


def capture_model(
    model: nn.Module | ExportedProgram,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    dynamic_shapes: Any,
) -> ExportedProgram:
    """Export a model in eval mode; a program of torch.export is returned as it is.

    Raises:
        InputError: it cannot be exported, or is something else.
    """
    if isinstance(model, ExportedProgram):
        if args or kwargs or dynamic_shapes:
            raise InputError(
                "an exported program has its inputs and dynamic shapes already",
                fix="quantize(program, calibration_data=…, backend=…)",
            )
        return model
    if not isinstance(model, nn.Module):
        raise InputError(
            f"quantize takes a module or a program of torch.export, found {type(model).__name__}",
            fix="for a .pt2 file: quantize(torch.export.load(path), …)",
        )
    if not isinstance(args, (tuple, list)):
        raise InputError(
            f"args is a tuple of inputs, found a {type(args).__name__}",
            fix="quantize(model, (x,), …)",
        )
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise InputError(
            f"kwargs is a dict of keyword inputs, found a {type(kwargs).__name__}",
            fix=_DATA,
        )
    if not args and not kwargs:
        raise InputError(
            "a model needs example inputs to be captured with",
            fix="quantize(model, args=(x,), …) or quantize(model, kwargs={…}, …)",
        )
    was_training = {name: m.training for name, m in model.named_modules()}
    try:
        # In eval mode: batch norms use their running statistics and dropout does nothing.
        with collect_new():
            return export(model.eval(), args, kwargs, dynamic_shapes=dynamic_shapes)
    except Exception as error:  # torch raises what the model raises, besides its own
        raise InputError(
            f"torch.export cannot capture this model: {_readable(error)}", fix=_way_out(error)
        ) from error
    finally:
        for name, module in model.named_modules():
            module.training = was_training[name]


def _readable(error: Exception) -> str:
    """Torch's own text without blank lines and advice on logging, indented below the first."""
    kept = [
        line.rstrip()
        for line in str(error).splitlines()
        if line.strip() and not line.startswith(_ADVICE)
    ]
    return "\n    ".join([type(error).__name__, *kept])


def _way_out(error: Exception) -> str:
    if "data-dependent" in str(error):
        return (
            "a captured graph has no branch on a tensor's value: use torch.where or torch.cond; "
            "torch.export.draft_export(model, args) lists every such place"
        )
    if "Cache'> in output" in str(error) or "past_key_values" in str(error):
        return (
            "one that only reads, or has an encoder: set model.config.use_cache = False; a decoder "
            "that generates: program = pq.export_causal_lm(model, max_length=…), then "
            "quantize(program, …)"
        )
    if "is not a known type" in str(error):
        return (
            "return tensors, or torch.utils._pytree.register_dataclass of the class that it names"
        )
    if "specialized it to be a constant" in str(error):
        return (
            "forward makes a dynamic size a number, as len(x) does: write x.shape[0]; or leave "
            "that dimension out of dynamic_shapes"
        )
    if "Suggested fixes" in str(error):
        return "write the dimensions in dynamic_shapes as torch suggests"
    if isinstance(error, TypeError) and "argument" in str(error):
        return (
            "give what forward takes; where batches have labels too, inputs= picks what the model "
            'takes: inputs=0, inputs=["input_ids"]'
        )
    if "dynamic_shapes" in str(error):
        return "name forward's parameters in dynamic_shapes, or give a tuple in their order"
    return "see that model(*args, **kwargs) runs, and then torch.export.export(model, args, kwargs)"
