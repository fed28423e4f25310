"""sensitivity: what quantizing each group of operators alone costs."""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from pt2e_quant.analysis.float_twin import FloatTwin, float_biases
from pt2e_quant.analysis.graph_side import GraphSide
from pt2e_quant.analysis.group_costs import (
    VERSION,
    Call,
    ExactCosts,
    GradientCosts,
    GroupCost,
    Method,
    Sensitivity,
    check_measure,
    weight_costs,
)
from pt2e_quant.analysis.metric import Metric, batches_of, first_of, measure_words, picker
from pt2e_quant.analysis.open_side import is_quantized, open_graph
from pt2e_quant.backends.artifact import result_builder
from pt2e_quant.backends.registry import get
from pt2e_quant.backends.target.backend import Backend
from pt2e_quant.backends.target.recipe_file import RecipeFile
from pt2e_quant.core.errors import ArtifactError, ConfigError, module_path, near
from pt2e_quant.core.progress import show_progress
from pt2e_quant.core.whole_file import whole_file
from pt2e_quant.flow.calibrate.calibrate import calibrate, preserve_buffers
from pt2e_quant.flow.calibrate.pick_inputs import InputPick, as_call, bind_batch, call_with
from pt2e_quant.flow.convert.convert_pt2e import convert_pt2e
from pt2e_quant.flow.prepare.prepare_pt2e import prepare_pt2e
from pt2e_quant.flow.prepare.prepared import PREPARED_KEY
from pt2e_quant.graph.meta import attribute
from pt2e_quant.graph.op_table import operator_name
from pt2e_quant.graph.subgraphs import copy_graph
from pt2e_quant.one_call import capture_model


def sensitivity(
    program: nn.Module | ExportedProgram,
    recipe: str | GraphModule | Any,
    batches: Iterable[Any] = (),
    *,
    backend: str | Backend | None = None,
    metric: Metric | None = None,
    higher_is_better: bool = True,
    method: str | Method = Method.EXACT,
    loss: Callable[[Any, Any], Tensor] | None = None,
    inputs: InputPick | None = None,
    targets: InputPick | None = None,
    calibration_data: Iterable[Any] | None = None,
    cache: str | Path | None = None,
    progress: bool = True,
) -> Sensitivity:
    """Find what quantizing each group of operators alone costs.

    A group is an operator with its inputs, its weights and its result. The model is quantized
    once, and run with one group switched on after the other. What comes before the group is
    computed once a batch, in float.

    Args:
        program: the float model.
        recipe: the name of one of `backend`, a recipe file, a quantizer, or what `convert` made of
            the program.
        batches: as `calibrate` takes them, with the targets of the metric where it has some.
        backend: whose recipe it is.
        metric: of the exact method: a function of a batch's outputs and targets, or an object with
            `update` and `compute`. None for the noise in the results against the float model's.
        higher_is_better: of the metric.
        method: "exact", "gradient" (one backward pass a batch) or "weight" (no data).
        loss: of outputs and targets, for the gradient method; None for the noise in the results.
        inputs: what of each batch the model takes, as `calibrate` has it.
        targets: what of each batch the metric takes besides the outputs: a key, an index, or a
            function. By default, with a metric or a loss, the second of a pair, and "labels" of
            a dict; without either there are no targets, and all of a batch is the model's.
        calibration_data: what to calibrate on; `batches` by default.
        cache: a JSON file that takes the sums after each batch. A later call of the same model,
            recipe and metric goes on behind the batches that are in it, if its own begin with
            these.
        progress: show progress bars on a terminal.

    Returns:
        The costs; `.worst(10)` are the groups to leave float.

    Raises:
        ConfigError: an argument is missing or of no use.
        ArtifactError: the cache cannot be written.
        InputError: a batch does not fit.
    """
    chosen = _method(method)
    check_measure(chosen, metric, loss)
    if cache is not None:
        _check_path(Path(cache))
    held = batches_of(batches, "sensitivity(program, recipe, {})")
    picked = picker(metric if loss is None else loss, inputs, targets)
    data = held if calibration_data is None else calibration_data
    model = _captured(program, held, picked)
    if chosen is not Method.WEIGHT:
        _check_data(held)
    quantized, name = _quantized(model, recipe, backend, lambda: map(picked.inputs_of, data))
    weighing = _Weighing(model, quantized, progress)

    def calls() -> Iterable[Call]:
        for taken, wanted in map(picked, held):
            yield Call(
                leaves=bind_batch(weighing.side.capture, taken, call="sensitivity"), targets=wanted
            )

    if chosen is Method.WEIGHT:
        return weighing.result(chosen, name, weight_costs(weighing.twin))
    if chosen is Method.GRADIENT:
        return weighing.result(chosen, name, weighing.by_gradients(calls, loss, cache))
    sign = 1 if higher_is_better else -1
    return weighing.by_running(calls, metric, sign, name, cache)


def _check_data(held: Iterable[Any]) -> None:
    if first_of(held) is None:
        raise ConfigError(
            "there is no batch to weigh groups on",
            fix='give at least one batch, or choose method="weight"',
        )


def _method(method: str | Method) -> Method:
    try:
        return Method(method)
    except ValueError:
        raise ConfigError(
            f'there is no method "{method}": {near(str(method), [m.value for m in Method])}'
        ) from None


def _captured(
    program: nn.Module | ExportedProgram, held: Iterable[Any], picked: Callable[[Any], Any]
) -> ExportedProgram | GraphModule:
    if isinstance(program, (ExportedProgram, GraphModule)):
        return program
    first = first_of(held)
    if first is None:
        raise ConfigError(
            "a module needs a batch to be captured with",
            fix="give batches, or a program of torch.export",
        )
    return call_with(lambda taken: capture_model(program, *as_call(taken), None), picked(first)[0])


def _quantized(
    model: ExportedProgram | GraphModule,
    recipe: str | GraphModule | Any,
    backend: str | Backend | None,
    data: Callable[[], Iterable[Any]],
) -> tuple[GraphModule, str]:
    """The program quantized by the recipe, and the recipe's name."""
    if isinstance(recipe, GraphModule):
        if not is_quantized(recipe) or PREPARED_KEY in recipe.meta:
            raise ConfigError(
                "the graph given as a recipe is not quantized",
                fix="give the result of convert, or the name of a recipe with backend=…",
            )
        return recipe, "the quantized graph"
    name = str(recipe) if isinstance(recipe, (str, Path)) else type(recipe).__name__
    if isinstance(recipe, (str, Path, RecipeFile)):
        if backend is None:
            raise ConfigError(
                f'the recipe "{recipe}" is of a backend',
                fix='sensitivity(program, "int8", batches, backend="xnnpack")',
            )
        target = get(backend) if isinstance(backend, str) else backend
        recipe = target.quantizer(recipe)
    given = copy_graph(model) if isinstance(model, GraphModule) else model
    prepared = prepare_pt2e(given, recipe)
    batches = iter(data())
    first = next(batches, None)
    if first is not None:
        calibrate(prepared, chain([first], batches), progress=False)
    return convert_pt2e(prepared), name


class _Weighing:
    """One program, quantized, whose groups are weighed."""

    def __init__(
        self, model: ExportedProgram | GraphModule, quantized: GraphModule, progress: bool
    ) -> None:
        self.progress = progress
        self.batches = 0
        self.side = GraphSide(quantized, "the quantized graph")
        self.build = result_builder(self.side.capture.out_spec)
        reference = open_graph(model, None)
        assert reference is not None
        self.twin = FloatTwin(self.side, _float_weights(reference, self.side))
        if not self.twin.groups:
            raise ConfigError(
                "no operator of this program reads a quantized tensor",
                fix="choose another recipe; pq.provenance_of(graph).floats says why operators are "
                "float",
            )

    def by_gradients(
        self,
        calls: Callable[[], Iterable[Call]],
        loss: Callable[[Any, Any], Tensor] | None,
        cache: str | Path | None,
    ) -> dict[str, float]:
        """The costs of all groups, one backward pass a batch."""
        gradients = GradientCosts(self.twin, self.build, loss)

        def shown() -> Iterable[Call]:
            return show_progress(calls(), "one backward pass a batch", enabled=self.progress)

        self._add_all(gradients, shown, lambda call, _: gradients.add(call), loss, cache)
        return gradients.costs()

    def by_running(
        self,
        calls: Callable[[], Iterable[Call]],
        metric: Metric | None,
        sign: int,
        name: str,
        cache: str | Path | None,
    ) -> Sensitivity:
        """The costs of all groups, one run of each a batch; sign is -1 of a metric to lower."""
        exact = ExactCosts(self.twin, self.build, metric)
        shown = "batch {}: one run a group" if self.progress else ""

        def add(call: Call, number: int) -> None:
            with torch.no_grad():
                exact.add(call, progress=shown.format(number))

        self._add_all(exact, calls, add, metric, cache)
        found = {group: sums.value() for group, sums in exact.sums.items()}
        if metric is None:
            return self.result(Method.EXACT, name, found)
        reference = exact.float_sum.value()
        costs = {group: sign * (reference - value) for group, value in found.items()}
        return self.result(Method.EXACT, name, costs, found, reference)

    def _add_all(
        self,
        costs: ExactCosts | GradientCosts,
        calls: Callable[[], Iterable[Call]],
        add: Callable[[Call, int], None],
        measure: object,
        cache: str | Path | None,
    ) -> None:
        """Weigh all groups on each batch; batches that the cache knows are not run again."""
        done = 0
        if cache is not None:
            kept = _Cache(Path(cache), _fingerprint(self.twin, type(costs), measure))
            done = kept.restore(costs, calls)
        for number, call in enumerate(calls(), 1):
            self.batches = number
            if number <= done:
                continue
            with preserve_buffers(self.side.gm, self.side.capture):
                add(call, number)
            if cache is not None:
                kept.write(costs, call)

    def result(
        self,
        method: Method,
        recipe: str,
        costs: Mapping[str, float],
        metrics: Mapping[str, float] | None = None,
        reference: float | None = None,
    ) -> Sensitivity:
        """The costs with what is known of each group."""
        rows = []
        for group in self.twin.groups:
            weights = [n for n, name in self.twin.weight_names.items() if name in group.weights]
            rows.append(
                GroupCost(
                    group=group.name,
                    operator=operator_name(group.anchor),
                    module=module_path(group.anchor),
                    weights=group.weights,
                    elements=sum(self.twin.float_weights[n].numel() for n in weights),
                    cost=costs[group.name],
                    metric=None if metrics is None else metrics[group.name],
                )
            )
        return Sensitivity(
            method=method,
            recipe=recipe,
            groups=tuple(rows),
            batches=self.batches,
            metric=reference,
        )


def _float_weights(reference: GraphSide, side: GraphSide) -> dict[str, Tensor]:
    """The float weights of a quantized graph, in its units, and the biases that it corrected."""
    found = {}
    biases = float_biases(side)
    for name, site in (side.weights | biases).items():
        value = attribute(reference.gm, name)
        if isinstance(value, Tensor) and value.is_floating_point():
            made = site.from_program(value.detach())
            if name not in biases or not torch.equal(made, attribute(side.gm, name)):
                found[name] = made
    return found


def _check_path(path: Path) -> None:
    """Refuse a path that cannot be written, before the work that would go into it."""
    reason = "it is a folder" if path.is_dir() else f"there is no folder {path.parent}"
    if path.is_dir() or not path.parent.is_dir():
        raise ArtifactError(
            f"cannot write the cache {path}: {reason}",
            fix="give a .json file in a folder that exists",
        )


class _Cache:
    """The sums of a weighing in a JSON file, written after each batch.

    Args:
        path: of the file.
        key: of what is weighed.
    """

    def __init__(self, path: Path, key: str) -> None:
        self.path = path
        self.key = key
        self.batches: list[str] = []
        """Digests of the batches that are in the sums."""

    def restore(
        self, costs: ExactCosts | GradientCosts, calls: Callable[[], Iterable[Call]]
    ) -> int:
        """Restore the sums over the first batches; returns how many these are."""
        try:
            data = json.loads(self.path.read_text())
        except (OSError, ValueError):
            return 0
        if not isinstance(data, dict) or data.get("key") != self.key:
            return 0
        held = data["batches"]
        if held != [_digest(call) for call in islice(calls(), len(held))]:
            return 0
        costs.restore(data["sums"])
        self.batches = held
        return len(held)

    def write(self, costs: ExactCosts | GradientCosts, call: Call) -> None:
        """Keep the sums after a batch; those of a metric with sums of its own are not numbers."""
        state = costs.state()
        if state is None:
            return
        self.batches.append(_digest(call))
        data = {"version": VERSION, "key": self.key, "batches": self.batches, "sums": state}
        with whole_file(self.path) as stream:
            stream.write(json.dumps(data).encode())


def _fingerprint(twin: FloatTwin, way: type, measure: object) -> str:
    """Return a hash of what sums depend on besides the batches: weights, graph, metric or loss."""
    found = hashlib.sha256(str(twin.gm.graph).encode())
    found.update(f"{way.__name__} {measure_words(measure)}".encode())
    _hash_values(found, [*twin.gm.state_dict().values(), *twin.float_weights.values()])
    return found.hexdigest()


def _digest(call: Call) -> str:
    found = hashlib.sha256()
    _hash_values(found, [*call.leaves, *pytree.tree_leaves(call.targets)])
    return found.hexdigest()


def _hash_values(into: Any, values: Iterable[Any]) -> None:
    for value in values:
        if isinstance(value, Tensor):
            data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            into.update(f"{value.dtype} {tuple(value.shape)}".encode())
            into.update(data.numpy().tobytes())
        else:
            into.update(value.tobytes() if hasattr(value, "tobytes") else repr(value).encode())
