"""Eager modules and graphs: export what is quantized, lower it, load a graph's weights back."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from pt2e_quant.backends.target.backend import Backend
from pt2e_quant.backends.target.recipe import Wanted
from pt2e_quant.core.arguments import check_module, check_type
from pt2e_quant.core.errors import ConfigError, UnsupportedError
from pt2e_quant.core.export import export
from pt2e_quant.core.provenance import provenance_of
from pt2e_quant.core.qparams import QParams
from pt2e_quant.core.schemes import Role, Scheme, TensorScheme
from pt2e_quant.core.specs import Q_ANNOTATION_KEY, QuantizationAnnotation
from pt2e_quant.flow.annotate.observer_choice import ObserverChoice
from pt2e_quant.flow.annotate.quantizer import Quantizer
from pt2e_quant.flow.annotate.rules import QuantRule, RuleKind
from pt2e_quant.flow.annotate.table_quantizer import TableQuantizer
from pt2e_quant.flow.convert.convert_pt2e import convert_pt2e
from pt2e_quant.flow.prepare.prepare_pt2e import prepare_pt2e
from pt2e_quant.flow.prepare.prepared import own_observers, prepared_graphs, prepared_state
from pt2e_quant.graph import ops
from pt2e_quant.graph.meta import source_constant
from pt2e_quant.graph.op_table import Slot
from pt2e_quant.graph.ops import is_call
from pt2e_quant.observers.static.derived import DerivedObserverOrFakeQuantize
from pt2e_quant.observers.weights.weight_search import WeightSearch
from pt2e_quant.passes.cleanup.contractions import ROWS
from pt2e_quant.passes.cleanup.linear_forms import products_as_linears
from pt2e_quant.tensors.graphs.stored_observers import (
    FoldedWeightError,
    StoredObserver,
    differs,
    held_by,
    stored_observer,
)
from pt2e_quant.tensors.quantized_tensor import QuantizedTensor
from pt2e_quant.tensors.run_batches import check_call

_PRODUCTS = ops.LINEAR + ops.CONV + ops.CONV_TRANSPOSE


def quantized_weights(module: nn.Module) -> dict[str, QuantizedTensor]:
    """The quantized parameters of a module by name, tied ones by each of their names."""
    named = module.named_parameters(remove_duplicate=False)
    return {name: value for name, value in named if isinstance(value, QuantizedTensor)}


def is_turned(tensor: QuantizedTensor) -> bool:
    """True if code sees a matrix as [in, out], whose rows were quantized."""
    return tensor.form.axes == (1, 0)


def turned(tensor: QuantizedTensor) -> QuantizedTensor:
    """A matrix with its axes the other way round, of the same codes."""
    made = tensor.t()
    assert isinstance(made, QuantizedTensor)
    return made


@contextlib.contextmanager
def real_weights(module: nn.Module) -> Iterator[dict[str, QuantizedTensor]]:
    """Within it, the quantized parameters of a module are float ones of the same real values.

    Tied ones stay tied. Gives the quantized ones by the name that a graph has for them: those of
    linears that hold their weight transposed are written as rows.
    """
    found = quantized_weights(module)
    made: dict[int, nn.Parameter] = {}
    for name, tensor in found.items():
        if id(tensor) not in made:
            made[id(tensor)] = nn.Parameter(tensor.dequantize().detach(), tensor.requires_grad)
        _set(module, name, made[id(tensor)])
    try:
        yield {
            f"{name}{ROWS}" if is_turned(t) else name: turned(t) if is_turned(t) else t
            for name, t in found.items()
        }
    finally:
        for name, tensor in found.items():
            _set(module, name, tensor)


def _set(module: nn.Module, name: str, value: Any) -> None:
    owner, _, leaf = name.rpartition(".")
    module.get_submodule(owner)._parameters[leaf] = value


class SchemeQuantizer(Quantizer):
    """Annotates the products and gathers of named weights, for no backend.

    Args:
        schemes: the schemes of weights by their names.
        search: how the scales of weights are found.
        keeps_weights: read weights as the module does: fold no batch norms or factors into them.
    """

    def __init__(
        self,
        schemes: Mapping[str, Scheme],
        search: WeightSearch = WeightSearch.MIN_MAX,
        *,
        keeps_weights: bool = False,
    ) -> None:
        self.schemes = dict(schemes)
        self.keeps_weights = keeps_weights
        self.choice = ObserverChoice(search=search)

    def transform_for_annotation(self, model: GraphModule) -> GraphModule:
        """Write products by a transposed weight as linears, where a scheme is for such rows."""
        if any(name.endswith(ROWS) for name in self.schemes):
            products_as_linears(model)
        return model

    def annotate(self, model: GraphModule) -> GraphModule:
        """Annotate every linear, convolution and embedding that reads one of the weights."""
        for node in model.graph.nodes:
            if is_call(node, _PRODUCTS):
                self._annotate(node, node.args[0], node.args[1])
            elif is_call(node, ops.EMBEDDING):
                self._annotate(node, None, node.args[0])
        return model

    def _annotate(self, node: Node, x: Any, weight: Any) -> None:
        constant = source_constant(weight) if isinstance(weight, Node) else None
        scheme = None if constant is None else self.schemes.get(str(constant.target))
        if scheme is None or scheme.weight is None:
            return
        inputs = {weight: self._spec(Role.WEIGHT, scheme.weight)}
        if x is not None and scheme.input is not None:
            inputs[x] = self._spec(Role.INPUT, scheme.input)
        node.meta[Q_ANNOTATION_KEY] = QuantizationAnnotation(
            input_qspec_map=inputs, output_qspec=None, _annotated=True
        )

    def _spec(self, role: Role, scheme: TensorScheme) -> Any:
        return self.choice.spec(Slot(at=role.value, role=role, accepts=(scheme,)), scheme)

    def validate(self, model: GraphModule) -> None:
        """Every annotation is one that convert takes; `pin_weights` asks whether all are there."""


def pin_weights(prepared: GraphModule, stored: Mapping[str, QuantizedTensor]) -> None:
    """Let a prepared graph's weights keep the codes and scales that tensors have.

    Args:
        prepared: of `prepare_pt2e`, with float weights of the same real values.
        stored: the tensors by the names of the weights.

    Raises:
        UnsupportedError: a weight is to be quantized otherwise, or stays float.
    """
    pinned: set[str] = set()
    for graph in prepared_graphs(prepared):
        state = prepared_state(graph)
        own_observers(state)
        for place, constant in enumerate(state.constants):
            name = constant.observer_info.source
            if name in stored:
                made = stored_observer(constant.observer, stored[name], name, held_by(graph, name))
                state.constants[place] = replace(constant, observer=made)
                pinned.add(name)
        swapped: dict[int, nn.Module] = {}
        for key, info in state.observer_infos.items():
            if info.is_constant and info.source in stored:
                old = graph.get_submodule(key)
                swapped[id(old)] = stored_observer(
                    old, stored[info.source], info.source, held_by(graph, info.source)
                )
                graph.add_module(key, swapped[id(old)])
                pinned.add(info.source)
        for observer in graph.modules():
            if isinstance(observer, DerivedObserverOrFakeQuantize):
                observer.obs_or_fqs = [swapped.get(id(o), o) for o in observer.obs_or_fqs]
        _pin_inputs(graph, stored)
    _check_pinned(prepared, stored, pinned)


def _pin_inputs(graph: GraphModule, stored: Mapping[str, QuantizedTensor]) -> None:
    """Let observers of static inputs keep the scales that the tensors have.

    Raises:
        UnsupportedError: the graph quantizes such an input otherwise, or to different scales.
    """
    pinned: dict[str, QParams] = {}
    infos = prepared_state(graph).observer_infos
    for node in graph.graph.nodes:
        if not is_call(node, _PRODUCTS):
            continue
        x, name = node.args[0], _weight_name(graph, node.args[1])
        tensor = stored.get(name)
        found = None if tensor is None else static_input(tensor)
        if found is None or tensor is None:
            continue
        key = str(x.target)
        if key not in infos:
            raise differs(f"the input of {name}", str(tensor.form.input), "float")
        observer: Any = graph.get_submodule(key)
        if observer.dtype != found.dtype:
            raise differs(f"the input of {name}", str(tensor.form.input), str(observer.dtype))
        if key in pinned and not _are_equal(pinned[key], found):
            raise differs(f"the input of {name}", str(tensor.form.input), "another module's")
        pinned[key] = found
        graph.add_module(key, StoredObserver(observer, found))


def _weight_name(graph: GraphModule, node: Any) -> str:
    """The name of the parameter that a product reads, as observed or as held."""
    source = source_constant(node) if isinstance(node, Node) else None
    if source is None and isinstance(node, Node) and node.op == "call_module":
        source = source_constant(node.all_input_nodes[0])
    return "" if source is None else str(source.target)


def _are_equal(one: QParams, other: QParams) -> bool:
    is_same = torch.equal(one.zero_point, other.zero_point)
    return is_same and torch.equal(one.scale, other.scale)


def static_input(tensor: QuantizedTensor) -> QParams | None:
    """The qparams of the activations that a weight is multiplied with; None if none are static."""
    scheme = tensor.form.input
    if scheme is None or scheme.is_dynamic:
        return None
    low, high = scheme.range
    scale, zero_point = tensor.parts["input_scale"], tensor.parts["input_zero_point"]
    return QParams(
        scale=scale, zero_point=zero_point, quant_min=low, quant_max=high, dtype=scheme.dtype
    )


def _check_pinned(
    prepared: GraphModule,
    stored: Mapping[str, QuantizedTensor],
    pinned: set[str],
) -> None:
    """Refuse weights that would silently go back to float; tied ones are pinned by one name."""
    held = {id(stored[name]) for name in pinned}
    missing = sorted(name for name, tensor in stored.items() if id(tensor) not in held)
    if not missing:
        return
    records = provenance_of(prepared).floats
    module = missing[0].rpartition(".")[0]
    reasons = [r.reason for r in records if r.module.removeprefix("L__self__.") == module]
    # The rule that leaves all float but what is quantized already (`stored_quantizer`).
    reasons = [reason for reason in reasons if not reason.startswith("rule: global -> float")]
    reasons.append("no operator that the backend quantizes reads it")
    raise UnsupportedError(
        f"{len(missing)} quantized weights would become float: {missing[0]} "
        f"({stored[missing[0]].form.scheme}): {reasons[0]}",
        fix="choose a scheme that the backend's table takes (docs/schemes.md), or another backend",
    )


def scheme_of(tensor: QuantizedTensor) -> Scheme:
    """The scheme by role that a quantized weight stands for."""
    form = tensor.form
    named = f"{form.input}, {form.scheme}" if form.input is not None else str(form.scheme)
    return Scheme(name=named, input=form.input, output=None, weight=form.scheme)


def stored_quantizer(target: Backend, stored: Mapping[str, QuantizedTensor]) -> TableQuantizer:
    """A backend's quantizer that quantizes what tensors are, and nothing else.

    It is that of the backend's nearest recipe, for its passes; with the tensors' schemes as rules.

    Raises:
        ConfigError: nothing is quantized.
    """
    if not stored:
        raise ConfigError(
            "recipe=None lowers what is quantized already, and no weight of this module is",
            fix='pq.quantize_(module, "w8") first, or name a recipe',
        )
    first = scheme_of(next(iter(stored.values())))
    quantizer = target.quantizer(target.recipes.nearest(Wanted.of(first)))
    rules = [QuantRule(kind=RuleKind.GLOBAL, scheme=None)]
    for name, tensor in stored.items():
        scheme = scheme_of(tensor)
        if scheme.input is not None and not scheme.input.is_dynamic:
            # Backends that multiply static integers write integers: data gives their scales.
            scheme = replace(scheme, output=scheme.input)
        # By the weight: attention multiplies with its projections' weights itself.
        rules.append(QuantRule(kind=RuleKind.GLOBAL, scheme=scheme, where=_reads(name)))
    quantizer.rules = rules
    quantizer.algorithms = ()
    return quantizer.allowing(*quantizer.preferences)


def _reads(name: str) -> Callable[[Node], bool]:
    def reads_it(node: Node) -> bool:
        constants = (source_constant(source) for source in node.all_input_nodes)
        return any(found is not None and str(found.target) == name for found in constants)

    return reads_it


def prepare_stored(
    program: ExportedProgram, quantizer: Any, stored: Mapping[str, QuantizedTensor]
) -> GraphModule:
    """Prepare a program that was exported within `real_weights`, to convert to the codes there are.

    Args:
        program: the program.
        quantizer: asks for the tensors' schemes.
        stored: the tensors by name.

    Raises:
        UnsupportedError: the quantizer asks for another scheme, or leaves one float.
    """
    prepared = prepare_pt2e(program, quantizer)
    try:
        pin_weights(prepared, stored)
    except FoldedWeightError:
        # Batch norms and factors that no scales take in stay operators of their own.
        quantizer.keeps_weights = True
        prepared = prepare_pt2e(program, quantizer)
        pin_weights(prepared, stored)
    return prepared


def to_graph(
    module: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic_shapes: Any = None,
) -> GraphModule:
    """The canonical q/dq graph of a module with quantized parameters, for any backend's `lower`.

    Args:
        module: its weights keep their codes; it is not changed.
        args: example inputs.
        kwargs: example keyword inputs.
        dynamic_shapes: as torch.export.export takes it.

    Raises:
        ConfigError: no weight of the module is quantized.
        InputError: the module does not take the inputs.
    """
    check_module("module", module)
    check_type("args", args, (tuple, list), "a tuple of example inputs", fix="args=(x,)")
    check_type("kwargs", kwargs or {}, Mapping, "a dict of example inputs", fix='kwargs={"x": x}')
    with real_weights(module) as stored:
        if not stored:
            raise ConfigError("no weight of this module is quantized", fix="quantize_ it first")
        check_call(module, args, kwargs or {})
        program = export(module, args, kwargs, dynamic_shapes=dynamic_shapes)
        quantizer = SchemeQuantizer({name: scheme_of(t) for name, t in stored.items()})
        return convert_pt2e(prepare_stored(program, quantizer, stored), progress=False)
