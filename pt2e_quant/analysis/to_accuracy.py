"""quantize(accuracy_drop=…): the artifact of a search for a metric."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn
from torch.export import ExportedProgram

from pt2e_quant.analysis.metric import Metric
from pt2e_quant.analysis.tune import tune
from pt2e_quant.backends.artifact import Artifact
from pt2e_quant.backends.target.backend import Backend
from pt2e_quant.backends.target.recipe_file import RecipeFile, RecipeName, as_recipe_file
from pt2e_quant.core.errors import ConfigError
from pt2e_quant.passes.algorithms.algorithm import Algorithm


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
