"""The quantizer for integer-only chips: it quantizes every operator that has an integer form."""

import copy
from collections.abc import Mapping, Set
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from pt2e_quant.core.errors import ConfigError, module_path
from pt2e_quant.core.provenance import FloatRecord, provenance_of
from pt2e_quant.core.recurrent_ops import Rounding
from pt2e_quant.core.specs import (
    Q_ANNOTATION_KEY,
    QuantizationAnnotation,
    QuantizationSpec,
    QuantizationSpecBase,
    SharedQuantizationSpec,
)
from pt2e_quant.flow.annotate.quantizer import Quantizer
from pt2e_quant.flow.qat.train_ranges import QAT_OBSERVERS, makes_fake_quantize
from pt2e_quant.graph.meta import computes_in_float, constant_nodes
from pt2e_quant.graph.op_table import operator_name
from pt2e_quant.graph.ops import (
    CONV,
    CONV_TRANSPOSE,
    LINEAR,
    MUL,
    arguments,
    is_call,
    is_getitem,
)
from pt2e_quant.graph.pipeline import run_passes
from pt2e_quant.observers.static.minmax import MinMaxObserver, PerChannelMinMaxObserver
from pt2e_quant.passes.attention.boolean_masks import boolean_masks
from pt2e_quant.passes.attention.decompose_attention import decompose_attention
from pt2e_quant.passes.attention.mask_softmax import mask_softmax
from pt2e_quant.passes.cleanup.einsums_as_products import einsums_as_products
from pt2e_quant.passes.cleanup.join_and_split import split_as_slices, unbind_as_selects
from pt2e_quant.passes.cleanup.remove_identities import remove_noop_casts, remove_noop_expand
from pt2e_quant.passes.cleanup.simpler_overloads import drop_unread_places
from pt2e_quant.passes.recurrent.split_recurrent import split_cells, split_recurrent
from pt2e_quant.passes.recurrent.write_steps import write_steps
from pt2e_quant.passes.reference.forms.moves import CLAMPS, MOVE_FORMS
from pt2e_quant.passes.reference.forms.products import PRODUCT_FORMS
from pt2e_quant.passes.reference.forms.registry import form_of, without_form
from pt2e_quant.passes.reference.read_sites import cast_booleans, cast_integers

_DTYPES = {4: torch.int8, 8: torch.int8, 16: torch.int16}
_WEIGHT_BITS = range(2, 9)
_NORMS = ("layer norm", "RMS norm", "group norm", "instance norm")
_STREAMING = ("add", "sub", "move", "join")
"""Forms whose results are values of a residual stream if they read or make one."""
_CHOOSING = ("move", "max_pool", "max_pool1d")
"""Forms whose results are values of their one input."""


_TRANSFORMS = (
    remove_noop_casts,
    drop_unread_places,
    boolean_masks,
    decompose_attention,
    mask_softmax,
    einsums_as_products,
    remove_noop_expand,
    split_cells(lambda node: True),
    split_recurrent(lambda node, sizes: Rounding.NONE),
    write_steps,
    split_as_slices,
    unbind_as_selects,
)


class IntegerQuantizer(Quantizer):
    """Quantizes every operator that has an integer form, norms and softmax too.

    This includes operators that the other backends leave float because float is as fast there.
    Activations are affine with one scale per tensor; views and max pools share the qparams of their
    input. A relu or clamp is fused with the operator before it. Weights of linears and convolutions
    are symmetric with one scale per output channel. Attention is decomposed first.

    Residual streams (inputs of norms, and the sums that make them) can have more bits: their values
    grow from block to block and have outlier channels, and one 8-bit scale would round the other
    channels to 0. Linears and convolutions read them requantized to activation_bits.

    Args:
        activation_bits: 4, 8 or 16.
        observer: chooses the scales of activations.
        weight_bits: 2 .. 8.
        residual_bits: 4, 8 or 16; activation_bits for those of other activations.

    Raises:
        ConfigError: activations or weights have other bits.
    """

    def __init__(
        self,
        activation_bits: int = 8,
        observer: Any = MinMaxObserver,
        *,
        weight_bits: int = 8,
        residual_bits: int = 16,
    ) -> None:
        for bits in (activation_bits, residual_bits):
            if bits not in _DTYPES:
                raise ConfigError(f"activations have 4, 8 or 16 bits, found {bits!r}")
        if weight_bits not in _WEIGHT_BITS:
            raise ConfigError(f"weights have 2 .. 8 bits, found {weight_bits!r}")
        self.weight_max = (1 << (weight_bits - 1)) - 1
        self.activation = _activation_spec(activation_bits, observer)
        self.residual = _activation_spec(residual_bits, observer)
        self.weights: tuple[Any, Any] = MinMaxObserver, PerChannelMinMaxObserver

    def for_qat(self) -> "IntegerQuantizer":
        """The quantizer for training: fake-quantizes in the places of observers."""
        made = copy.copy(self)
        if not makes_fake_quantize(self.activation.observer_or_fake_quant_ctr):
            ranges = QAT_OBSERVERS.activation
            made.activation = replace(self.activation, observer_or_fake_quant_ctr=ranges)
            made.residual = replace(self.residual, observer_or_fake_quant_ctr=ranges)
        made.weights = QAT_OBSERVERS.ranged, QAT_OBSERVERS.ranged_per_channel
        return made

    def transform_for_annotation(self, model: GraphModule) -> GraphModule:
        """Write attention, steps of recurrent layers, splits and unbinds out as their parts."""
        run_passes(model, _TRANSFORMS)
        return model

    def annotate(self, model: GraphModule) -> GraphModule:
        """Annotate what has a form; the provenance records the rest."""
        constants = constant_nodes(model.graph)
        stream = _residual_stream(model.graph, constants)
        floats = []
        for node in model.graph.nodes:
            if node.op != "call_function" or node in constants or is_getitem(node):
                continue
            if form_of(node) is None:
                is_cast = cast_booleans(node) or cast_integers(node)
                if computes_in_float(node) and is_cast is None:
                    floats.append(_float_record(node))
                continue
            inputs: dict[Node, QuantizationSpecBase | None] = {}
            for source in [] if _clamped(node) else _quantized_inputs(node):
                is_fixed = source in constants
                is_wide = source in stream and _keeps_stream(node)
                read = self.residual if is_wide else self.activation
                spec = self._constant_spec(node, source, read) if is_fixed else read
                if spec is not None and _is_float(source):
                    inputs[source] = spec
            node.meta[Q_ANNOTATION_KEY] = QuantizationAnnotation(
                input_qspec_map=inputs,
                output_qspec=self._output_spec(node, inputs, node in stream),
                _annotated=True,
            )
        provenance = provenance_of(model)
        provenance.quantizer = "every integer form"
        provenance.set_floats(floats)
        return model

    def _output_spec(
        self, node: Node, inputs: Mapping[Node, QuantizationSpecBase | None], is_wide: bool
    ) -> QuantizationSpecBase | None:
        form = form_of(node)
        if form is not None and form.name in _CHOOSING and len(inputs) == 1:
            return SharedQuantizationSpec((next(iter(inputs)), node))
        readers = list(node.users)
        if len(readers) == 1 and _clamped(readers[0]) is node:
            return None
        spec = self.residual if is_wide else self.activation
        return spec if _is_float(node) else None

    def _constant_spec(
        self, node: Node, source: Node, read: QuantizationSpec
    ) -> QuantizationSpec | None:
        """Return how a constant is quantized; None where the form of its reader takes floats.

        A constant that is moved at run time (rows of a table that trains) is of the moved values'
        type; nothing in front of the move says its scale.
        """
        if _form_name(node) == "move":
            return replace(read, observer_or_fake_quant_ctr=self.weights[0])
        value = source.meta.get("val")
        if form_of(node) not in PRODUCT_FORMS or not isinstance(value, Tensor) or value.dim() < 2:
            return None
        axis = None
        if arguments(node).get("weight") is source:
            axis = 0 if is_call(node, LINEAR + CONV) else None
            if is_call(node, CONV_TRANSPOSE) and arguments(node)["groups"] == 1:
                axis = 1
        return QuantizationSpec(
            dtype=torch.int8,
            observer_or_fake_quant_ctr=self.weights[axis is not None],
            qscheme=torch.per_tensor_symmetric if axis is None else torch.per_channel_symmetric,
            ch_axis=axis,
            quant_min=-self.weight_max,
            quant_max=self.weight_max,
        )

    def validate(self, model: GraphModule) -> None:
        """Every annotation is of a form."""


def _activation_spec(bits: int, observer: Any) -> QuantizationSpec:
    limit = 1 << (bits - 1)
    return QuantizationSpec(
        dtype=_DTYPES[bits],
        observer_or_fake_quant_ctr=observer,
        qscheme=torch.per_tensor_affine,
        quant_min=-limit,
        quant_max=limit - 1,
    )


def _residual_stream(graph: Graph, constants: Set[Node]) -> set[Node]:
    """The values of residual streams: inputs of norms, and the sums, views and joins behind them.

    A CNN whose batch norms are folded has no norms, and so no residual stream.
    """
    found: set[Node] = set()
    open_nodes = [n for node in graph.nodes if _form_name(node) in _NORMS for n in _read(node)]
    while open_nodes:
        node = open_nodes.pop()
        if node in found or node in constants or not _is_float(node):
            continue
        found.add(node)
        if _form_name(node) in _STREAMING:
            open_nodes += _read(node)
        for user in node.users:
            if _form_name(user) in _STREAMING:
                open_nodes.append(user)
    return found


def _read(node: Node) -> list[Node]:
    """The data inputs of an operator: of a norm the first, otherwise all."""
    return node.all_input_nodes[:1] if _form_name(node) in _NORMS else node.all_input_nodes


def _quantized_inputs(node: Node) -> list[Node]:
    """The inputs of an operator, without the booleans that a product multiplies by."""
    gates = [n for n in node.all_input_nodes if is_call(node, MUL) and cast_booleans(n) is not None]
    if len(gates) == len(node.all_input_nodes):
        return node.all_input_nodes
    return [n for n in node.all_input_nodes if n not in gates]


def _keeps_stream(node: Node) -> bool:
    return _form_name(node) in _NORMS + _STREAMING


def _form_name(node: Node) -> str | None:
    form = form_of(node)
    return None if form is None else form.name


def _is_float(node: Node) -> bool:
    value = node.meta.get("val")
    first = value[0] if isinstance(value, (tuple, list)) and value else value
    return isinstance(first, Tensor) and first.is_floating_point()


def _clamped(node: Node) -> Node | None:
    """The operator that a relu or clamp is fused with, None if there is none.

    Runtimes round once there, whatever the graph says: XNNPACK moves a clamp into the operator
    before it, ONNX Runtime merges the two pairs of q/dq.
    """
    source = node.all_input_nodes[0] if is_call(node, CLAMPS) else None
    if source is None or len(source.users) > 1 or not _is_float(source):
        return None
    form = form_of(source)
    return None if form is None or form in MOVE_FORMS or form.name in _CHOOSING else source


def _float_record(node: Node) -> FloatRecord:
    reason, fix = without_form(node)
    return FloatRecord(
        node=node.name,
        op=operator_name(node),
        module=module_path(node),
        reason=reason,
        fix=fix,
    )
