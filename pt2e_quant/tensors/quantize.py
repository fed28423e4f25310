"""`quantize_`: a module's weights quantized in place, and activations with them."""

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, cast

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pt2e_quant.core.arguments import check_module, check_type
from pt2e_quant.core.errors import CalibrationError, ConfigError, Pt2eQuantError, Pt2eQuantWarning
from pt2e_quant.core.schemes import Scheme, TensorScheme
from pt2e_quant.flow.annotate.rules import QuantRule
from pt2e_quant.flow.calibrate.calibrate import calibrate, check_batches
from pt2e_quant.flow.calibrate.pick_inputs import InputPick, pick_inputs
from pt2e_quant.flow.convert.convert_pt2e import convert_pt2e
from pt2e_quant.flow.prepare.prepare_pt2e import prepare_pt2e
from pt2e_quant.observers.weights.weight_search import WeightSearch
from pt2e_quant.passes.algorithms.algorithm import Algorithm
from pt2e_quant.passes.cleanup.contractions import ROWS
from pt2e_quant.tensors.calibrate_inputs import Calibrated, calibrated
from pt2e_quant.tensors.export_batches import export_batches
from pt2e_quant.tensors.function_ranges import install_functions
from pt2e_quant.tensors.graphs.graph import SchemeQuantizer, quantized_weights, scheme_of, turned
from pt2e_quant.tensors.graphs.load_graph import load_graph, quantized_names
from pt2e_quant.tensors.kernels.choose_layout import best_layout
from pt2e_quant.tensors.layouts.table import layout_named
from pt2e_quant.tensors.plan import (
    Filter,
    Place,
    as_scheme,
    floats_beside,
    holds_transposed,
    places_of,
    upright,
    why_not,
)
from pt2e_quant.tensors.quantized_tensor import QuantizedTensor, as_parameter
from pt2e_quant.tensors.report import EagerReport, Row

_OR_LEAVE_IT = "leave it out by the filter or a rule, or give strict=False to keep it float"


def quantize_(
    module: nn.Module,
    scheme: str | Scheme | None,
    filter: Filter | None = None,
    *,
    rules: Sequence[QuantRule] = (),
    layout: str = "auto",
    search: str | None = None,
    calibration_data: Iterable[Any] | None = None,
    inputs: InputPick | None = None,
    algorithms: Sequence[str | Algorithm] = (),
    functions: bool = False,
    strict: bool = True,
) -> EagerReport:
    """Quantize the weights of a module in place; its forward stays as it is.

    Args:
        module: any module; one on the meta device gets tensors to load a state dict into
            (`load_state_dict(…, assign=True)`).
        scheme: a name ("w8", "int8_dynamic", "w4_g32", "mxfp4_weight_only", "int8", …) or a
            scheme; None where `rules` say all.
        filter: of (module, path), which modules; linears by default. Embeddings and convolutions
            are quantized where it says so.
        rules: other schemes, or None, for modules by name or class; the more specific wins.
        layout: "auto" for the fastest there is on the weight's device, or a layout's name.
        search: how scales are found, "min_max", "mse" or "hqq"; None for the range. The graph
            flow's recipes take "mse" below 8 bits and for small floats: some dB nearer, and tens
            of times as long to find.
        calibration_data: batches, as `pq.calibrate` takes them: for static activations, and for
            algorithms.
        inputs: what of each batch the module takes.
        algorithms: of `pq.algorithms`, run on the module's graph: "gptq", say.
        functions: calibrate the results of functions that no module owns (`torch.log`, `cat`,
            `F.elu`) and quantize them to the scheme's output; it needs a static scheme.
        strict: an error where a weight that was asked for cannot be quantized; otherwise a warning
            and a row in the report.

    Returns:
        What became of each weight; `others` has the parameters that nothing asked for.

    Raises:
        ConfigError: a scheme, rule or layout does not fit; names the module.
        CalibrationError: static activations or an algorithm without data.
    """
    chosen = None if scheme is None else as_scheme(scheme)
    check_layout(layout)
    search_of(search)
    check_type("algorithms", algorithms, (list, tuple), "a list", fix='algorithms=["gptq"]')
    places = places_of(module, chosen, filter, rules)
    if not places:
        raise ConfigError(
            f"no module of this {type(module).__name__} is to be quantized",
            fix="give a filter that takes some of its modules: linears alone are by default",
        )
    if calibration_data is not None:
        check_batches(calibration_data)
    batches = None if calibration_data is None else list(calibration_data)
    if algorithms:
        picked = [pick_inputs(batch, inputs) for batch in batches or ()]
        picked = [batch for batch in picked if _has_rows(batch)]
        return _by_graph(module, places, algorithms, picked, layout, search, strict=strict)
    found = calibrated(module, places, chosen, batches, inputs, functions=functions)
    report, how = EagerReport(), _How(module, found, layout, search, strict=strict)
    try:
        for place in places:
            report.rows.append(how.quantize(place))
    except BaseException:
        how.undo()  # a module that is quantized in part is of no use
        raise
    report.others = floats_beside(module, (row.name for row in report.rows))
    if isinstance(chosen, Scheme) and functions:
        install_functions(module, found.functions)
    return report


class _How:
    """Settings for all weights of one call: layouts, searches, results of calibration."""

    def __init__(
        self,
        module: nn.Module,
        found: Calibrated,
        layout: str,
        search: str | None,
        *,
        strict: bool,
    ) -> None:
        self.holders = holders_of(module)
        self.found = found
        self.layout = layout
        self.search = search
        self.strict = strict
        self.done: dict[int, Row] = {}

    def quantize(self, place: Place) -> Row:
        """Quantize one weight, wherever it is read: tied ones stay tied."""
        old, reason = place.weight, why_not(place)
        if id(old) in self.done:
            return replace(self.done[id(old)], name=place.name)
        scheme = place.scheme.weight
        assert scheme is not None  # places have weights
        if place.path in self.found.unreached:
            # nn.MultiheadAttention, for one, multiplies with its projection's weight itself.
            reason = f'no batch with a row reached "{place.path}": its input has no range'
            if self.strict:
                raise CalibrationError(reason, fix=f"give data that runs it, {_OR_LEAVE_IT}")
        if not reason:
            try:
                tensor = QuantizedTensor.from_float(
                    upright(place.module),
                    scheme,
                    input=place.scheme.input,
                    search=search_of(self.search),
                )
            except Pt2eQuantError as error:
                reason = str(error)
        if reason:
            return _left(place, reason, strict=self.strict)
        if place.path in self.found.inputs:
            tensor = with_input(tensor, *self.found.inputs[place.path])
        row = put_in_place(self.holders[old], place, old, tensor, self.layout)
        self.done[id(place.weight)] = row
        return row

    def undo(self) -> None:
        """Put all parameters back."""
        for old, holders in self.holders.items():
            for owner, leaf in holders:
                owner._parameters[leaf] = cast(nn.Parameter, old)


Holders = list[tuple[nn.Module, str]]


def holders_of(module: nn.Module) -> dict[Tensor, Holders]:
    """The modules, with their names for it, that read each parameter."""
    found: dict[Tensor, Holders] = {}
    for owner in module.modules():
        for leaf, parameter in owner._parameters.items():
            if parameter is not None:
                found.setdefault(parameter, []).append((owner, leaf))
    return found


def put_in_place(
    holders: Holders, place: Place, old: Tensor, tensor: QuantizedTensor, layout: str
) -> Row:
    """Put a tensor wherever the parameter of a place is read: tied ones stay tied.

    Args:
        holders: what reads the parameter.
        place: of the weight.
        old: the float weight, for the report.
        tensor: what takes its place.
        layout: of the result, or "auto".
    """
    if layout == "auto":
        gathers = any(isinstance(owner, nn.Embedding) for owner, _ in holders)
        layout = best_layout(tensor, gathers=gathers)
    try:
        made = tensor if tensor.is_meta else tensor.to_layout(layout)
    except ConfigError as error:
        raise ConfigError(f'"{place.name}": {error}') from error
    if holds_transposed(place.module) and made.form.is_upright:
        made = turned(made)
    # Codes are not trained; `training.quantize_parameters` makes parameters that are.
    new = as_parameter(made, requires_grad=False)
    for owner, leaf in holders:
        owner._parameters[leaf] = new
    return row_of(place.name, old, made)


def pack_(module: nn.Module, layout: str = "auto") -> None:
    """Give the quantized weights of a module another layout, after a load or a move for example.

    Args:
        module: its weights keep their codes; tied ones stay tied.
        layout: "auto" for the fastest where each weight is, or a layout's name.

    Raises:
        ConfigError: a weight does not go into the layout.
    """
    check_module("module", module)
    check_layout(layout)
    done: set[int] = set()
    holders = holders_of(module)
    for name, weight in quantized_weights(module).items():
        path, _, leaf = name.rpartition(".")
        if leaf != "weight" or id(weight) in done:
            continue
        owner = module.get_submodule(path)
        place = Place(path=path, module=owner, scheme=scheme_of(weight))
        put_in_place(holders[weight], place, weight, weight, layout)
        done.add(id(owner._parameters[leaf]))


def check_layout(layout: str) -> None:
    """Check the name of a layout, before anything is quantized.

    Raises:
        ConfigError: it is neither "auto" nor a layout's.
    """
    if layout != "auto":
        layout_named(layout)


def row_of(name: str, old: Tensor, new: QuantizedTensor) -> Row:
    """The row of a weight that is quantized now."""
    return Row(
        name=name,
        scheme=_text_of(new.form.scheme),
        layout=new.form.layout,
        bytes_before=old.numel() * old.element_size(),
        bytes_after=new.nbytes,
    )


@lru_cache(maxsize=64)
def _text_of(scheme: TensorScheme) -> str:
    return str(scheme)


def _left(place: Place, reason: str, *, strict: bool) -> Row:
    text = f'"{place.name}" cannot be quantized to {place.scheme.weight}: {reason}'
    if strict:
        raise ConfigError(text, fix=_OR_LEAVE_IT)
    warnings.warn(text, Pt2eQuantWarning, stacklevel=4)
    return Row(name=place.name, reason=reason.partition("\n")[0])


def search_of(search: str | None) -> WeightSearch:
    """Return the method for a weight's scales: as asked for, else by the range, in one pass."""
    return WeightSearch.MIN_MAX if search is None else WeightSearch.named(search)


def with_input(tensor: QuantizedTensor, scale: Tensor, zero_point: Tensor) -> QuantizedTensor:
    """A weight in the plain layout with the static qparams of its activations."""
    parts = tensor.parts | {"input_scale": scale, "input_zero_point": zero_point}
    return tensor.like(parts, tensor.form)


def _has_rows(batch: Any) -> bool:
    """False for the empty batch that some loaders end with: no graph is exported for it."""
    return all(x.numel() for x in pytree.tree_leaves(batch) if isinstance(x, Tensor))


def _names_of(module: nn.Module, place: Place) -> set[str]:
    """Every name that a graph may have for a weight; it has one of those of a shared module."""
    named = module.named_parameters(remove_duplicate=False)
    end = ROWS if holds_transposed(place.module) else ""
    return {f"{name}{end}" for name, parameter in named if parameter is place.weight}


def _by_graph(
    module: nn.Module,
    places: Sequence[Place],
    algorithms: Sequence[str | Algorithm],
    batches: list[Any],
    layout: str,
    search: str | None,
    *,
    strict: bool,
) -> EagerReport:
    """Let the graph flow's algorithms choose the codes, and load them back."""
    if not batches:
        raise CalibrationError(
            "algorithms work on calibration data with rows",
            fix="quantize_(…, calibration_data=batches)",
        )
    before = {place.name: place.weight for place in places}
    names = {place.name: _names_of(module, place) for place in places}
    schemes = {name: place.scheme for place in places for name in names[place.name]}
    quantizer = SchemeQuantizer(schemes, search_of(search), keeps_weights=True)
    prepared = prepare_pt2e(export_batches(module, batches), quantizer, algorithms=algorithms)
    calibrate(prepared, batches, progress=False)
    graph = convert_pt2e(prepared, progress=False)
    report, found = EagerReport(), quantized_names(graph)
    read = [place for place in places if found & names[place.name]]
    for place in places:
        if place not in read:
            reason = "no linear, convolution or embedding of the exported module reads it"
            report.rows.append(_left(place, reason, strict=strict))
    load_graph(module, graph)
    for place in read:
        tensor = place.weight
        assert isinstance(tensor, QuantizedTensor)  # the graph has it
        own = holders_of(module)[tensor]
        report.rows.append(put_in_place(own, place, before[place.name], tensor, layout))
    report.others = floats_beside(module, (row.name for row in report.rows))
    return report
