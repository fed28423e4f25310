"""Mixed precision, chosen by what each scheme costs each group: tune, quantize(accuracy_drop=…)."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn
from torch.export import ExportedProgram

from pt2e_quant.analysis.bench_mixes import Bench, Goal
from pt2e_quant.analysis.group_costs import Method
from pt2e_quant.analysis.metric import Metric, batches_of, picker
from pt2e_quant.analysis.search_mixes import Search
from pt2e_quant.analysis.tuned import Tuned
from pt2e_quant.backends.artifact import Artifact, Verify
from pt2e_quant.backends.registry import get
from pt2e_quant.backends.target.backend import Backend
from pt2e_quant.backends.target.recipe_file import RecipeFile, RecipeName, as_recipe_file
from pt2e_quant.core.errors import ConfigError
from pt2e_quant.flow.calibrate.pick_inputs import InputPick
from pt2e_quant.one_call import capture_model
from pt2e_quant.passes.algorithms.algorithm import Algorithm

FOR_ACCURACY = ("int8_dynamic",)
"""Recipes tried between the user's and float for accuracy, as far as the backend has them."""

FOR_SIZE = ("w8", "a8w4_g32", "w4_g32")
"""Further recipes that are tried under a budget of bytes."""

_EVALUATION = "tune(…, evaluation_data={})"


def tune(
    model: nn.Module | ExportedProgram,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic_shapes: Any = None,
    calibration_data: Iterable[Any],
    backend: str | Backend,
    recipe: RecipeName = "int8",
    target: float | None = None,
    accuracy_drop: float | None = None,
    budget: Mapping[str, float] | None = None,
    metric: Metric | None = None,
    higher_is_better: bool = True,
    menu: Sequence[str] | None = None,
    evaluation_data: Iterable[Any] | None = None,
    inputs: InputPick | None = None,
    targets: InputPick | None = None,
    method: str | Method = Method.EXACT,
    points: int = 4,
    verify: Verify = True,
    progress: bool = True,
) -> Tuned:
    """Choose a scheme for each group of operators, and lower the model with them.

    Each recipe of the menu is tried on each group alone; an integer program then chooses, and
    the choice is built and measured. With `target` or `accuracy_drop` it is the one that gives up
    the recipe at the fewest groups; with `budget` the one with the least noise that fits.

    Args:
        model: a float model, or a program of torch.export.
        args: example positional inputs; not needed for an exported program.
        kwargs: example keyword inputs.
        dynamic_shapes: as torch.export.export takes it.
        calibration_data: batches, as `calibrate` takes them; with the metric's targets where it
            has some, and `evaluation_data` is not given.
        backend: where the model is to run; only schemes that it has recipes for are tried.
        recipe: what a group gets that has no reason for another scheme: a name, the path of a
            recipe file, or a `RecipeFile`.
        target: the metric to reach.
        accuracy_drop: by how much the metric may be below the float model's, in place of `target`.
        budget: {"bytes": N} of all constants, {"bits": N}, the mean bits of an element, or
            {"latency_us": N} of a call on the backend, timed on this machine.
        metric: a function of outputs and targets, or an object with `update` and `compute`. None
            for the cosine between the outputs and the float model's, the mean over samples.
        higher_is_better: of the metric.
        menu: what else groups may get besides float, the nearest to the recipe first: recipes of
            the backend, with other ranges and more algorithms where they are named, "int8@mse",
            "w4_g32+gptq". None for `FOR_ACCURACY`, under a budget of bytes or bits `FOR_SIZE`, as
            the backend has them.
        evaluation_data: what the metric is measured on; `calibration_data` by default.
        inputs: what of each batch the model takes, as `calibrate` has it.
        targets: what of each batch the metric takes besides the outputs.
        method: how groups are weighed, as `sensitivity` has it: "gradient" for large models.
        points: how many further mixes, of other sizes, are built and measured for the front.
        verify: as `quantize` has it.
        progress: show progress bars on a terminal.

    Returns:
        The artifact, its recipe, the front, and why each group got what it has.

    Raises:
        ConfigError: neither a target nor a budget is given, or both; or the budget is too small.
        UnsupportedError: no mix reaches the target.
        MissingExtraError: scipy is not installed.
    """
    goal = Goal.of(target, accuracy_drop, budget, higher_is_better)
    chosen = get(backend) if isinstance(backend, str) else backend
    chosen.require_extra()
    program = capture_model(model, args, kwargs, dynamic_shapes)
    data = batches_of(calibration_data, "tune(…, calibration_data={})")
    picked = picker(metric, inputs, targets)
    held = data if evaluation_data is None else batches_of(evaluation_data, _EVALUATION)
    bench = Bench(program, chosen, data, held, picked, metric, progress)
    base = _recipe_of(recipe, chosen)
    is_of_size = goal.budget is not None and not goal.is_of_time
    names = (FOR_SIZE if is_of_size else FOR_ACCURACY) if menu is None else menu
    search = Search(bench, base, names, goal, method, may_lack=menu is None)
    best = search.run(points)
    artifact = chosen.lower(search.graph_of(best), verify=verify)
    return search.result(best, artifact)


def _recipe_of(recipe: RecipeName, backend: Backend) -> RecipeFile:
    return as_recipe_file(recipe) or RecipeFile(backend=backend.name, recipe=str(recipe))


def quantize_to_accuracy(
    model: nn.Module | ExportedProgram,
    example: tuple[Sequence[Any], Mapping[str, Any] | None, Any],
    recipe: RecipeFile,
    target: Backend,
    calibration_data: Iterable[Any] | None,
    accuracy_drop: float | None,
    metric: Metric | None,
    **how: Any,
) -> Artifact:
    """The artifact that `tune` finds for a fall of a metric.

    Args:
        model: as `quantize` takes it.
        example: args, kwargs and dynamic shapes.
        recipe: what groups get that have no reason for another scheme.
        target: the backend.
        calibration_data: with the metric's targets.
        accuracy_drop: how far the metric may fall.
        metric: as `tune` has it.
        how: inputs, verify and progress, as `tune` has them.

    Raises:
        ConfigError: there is no data, or no goal.
    """
    if accuracy_drop is None:
        raise ConfigError("a metric alone says no goal", fix="accuracy_drop=0.01, metric=…")
    if calibration_data is None:
        raise ConfigError(
            "accuracy_drop is measured on calibration data, and there is none",
            fix="quantize(…, calibration_data=batches, accuracy_drop=0.01, metric=…)",
        )
    args, kwargs, dynamic_shapes = example
    return tune(
        model,
        args,
        kwargs,
        dynamic_shapes=dynamic_shapes,
        calibration_data=calibration_data,
        backend=target,
        recipe=recipe,
        accuracy_drop=accuracy_drop,
        metric=metric,
        points=0,
        **how,
    ).artifact


def base_recipe(
    recipe: RecipeName | None,
    target: Backend,
    algorithms: Sequence[str | Algorithm],
    others: Mapping[str, Any],
) -> RecipeFile:
    """The recipe that a search begins with, of the arguments of `quantize`.

    Raises:
        ConfigError: an argument does not go with a search.
    """
    for name, value in others.items():
        if value:
            raise ConfigError(
                f"{name} does not go with accuracy_drop",
                fix="search with pq.tune first, and give its recipe file to quantize(recipe=…)",
            )
    named = tuple(a for a in algorithms if isinstance(a, str))
    if recipe is None or len(named) < len(algorithms):
        raise ConfigError(
            "accuracy_drop takes a recipe, and algorithms by name",
            fix='recipe="int8", algorithms=["gptq"]; or pq.tune(recipe=RecipeFile(…))',
        )
    if (base := as_recipe_file(recipe)) is not None:
        return replace(base, algorithms=(*base.algorithms, *named))
    return RecipeFile(backend=target.name, recipe=str(recipe), algorithms=named)
