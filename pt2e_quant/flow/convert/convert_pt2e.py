"""convert: observers become q/dq, weights become integers, every tensor gets its record."""

import copy
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node

from pt2e_quant.accelerate.pause_gc import pause_gc
from pt2e_quant.core.canonical import Form, verify_canonical
from pt2e_quant.core.dtypes import FLOAT8
from pt2e_quant.core.errors import (
    CalibrationError,
    Pt2eQuantWarning,
    UnsupportedError,
)
from pt2e_quant.core.provenance import Provenance, TensorRecord, provenance_of
from pt2e_quant.core.qparams import QParams
from pt2e_quant.core.specs import Q_ANNOTATION_KEY
from pt2e_quant.flow.calibrate.sample import SAMPLE_KEY
from pt2e_quant.flow.convert.draft import place_in_float
from pt2e_quant.flow.convert.emit_qdq import (
    Quantized,
    described,
    emit_blocks,
    emit_casts,
    emit_dynamic,
    emit_run_time_scales,
    emit_static,
    is_affine_choice,
)
from pt2e_quant.flow.convert.joint_qparams import qparams_by_observer
from pt2e_quant.flow.convert.observed_qparams import (
    check_gathered,
    has_seen,
    infos_of_split,
    leave_float,
    never_ran,
    observed_range,
    record_of,
    recorded,
    recorded_affine,
    saw_data,
)
from pt2e_quant.flow.convert.quantize_constants import (
    HeldPlace,
    held_places,
    quantize_constants,
    show_constants,
)
from pt2e_quant.flow.prepare.prepared import (
    HALF_CONVERTED,
    PREPARED_KEY,
    ObserverInfo,
    PreparedState,
    observed_node,
    observers_of,
    prepared_graphs,
    prepared_state,
)
from pt2e_quant.flow.qat.train_mode import set_training_flags
from pt2e_quant.flow.report.audit import refuse_float_operators
from pt2e_quant.flow.report.size_ledger import check_smaller, constant_bytes, take_ledger
from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.meta import copy_trace, give_values
from pt2e_quant.graph.pipeline import log_passes, one_recompile, run_passes
from pt2e_quant.graph.subgraphs import bodies, direct_bodies
from pt2e_quant.observers.run_time.placeholder import RunTimeScales
from pt2e_quant.observers.static.float_activation import FloatActivationObserver
from pt2e_quant.observers.training.trained_qparams import qparams_of
from pt2e_quant.observers.weights.block_weight import BlockWeightObserver
from pt2e_quant.passes.algorithms.algorithm import as_pass, take_statistics
from pt2e_quant.passes.batch_norm.expanded_conv_bn import fold_expanded_conv_bn
from pt2e_quant.passes.batch_norm.fold_batch_norm import fold_trained_batch_norm
from pt2e_quant.passes.cleanup.drop_dead_constants import drop_dead_constants
from pt2e_quant.passes.cleanup.fold_constants import (
    fold_observed_constants,
    fold_trained_constants,
)
from pt2e_quant.passes.cleanup.lift_constants import lift_constants
from pt2e_quant.passes.cleanup.remove_dropout import remove_dropout
from pt2e_quant.passes.mutation.functionalize_activations import restore_in_place
from pt2e_quant.passes.qdq.port_metadata import port_metadata
from pt2e_quant.passes.recurrent.round_recurrent import round_recurrent
from pt2e_quant.passes.reference.integer_forward import drop_integer_forwards
from pt2e_quant.passes.weights.pack_weights import pack_weights
from pt2e_quant.passes.weights.store_weights import store_weights

END_OF_TRAINING = (
    drop_integer_forwards,
    fold_trained_batch_norm,
    fold_expanded_conv_bn,
    remove_dropout,
)
"""The passes that make an inference graph of a trained one."""


def convert_pt2e(
    prepared: GraphModule,
    *,
    fold_quantize: bool = True,
    pack: bool = True,
    progress: bool = False,
) -> GraphModule:
    """Replace the observers of a calibrated graph by q/dq, in place.

    Args:
        prepared: of `prepare_pt2e`, with data run through it.
        fold_quantize: store weights as integers; False keeps float weights and their quantize.
        pack: store weights of less than 8 bits packed, see `core.packing`.
        progress: show a progress bar of the weights on a terminal.

    Returns:
        The canonical q/dq graph, verified.

    An interrupt leaves a graph that says so and is of no more use.

    Raises:
        CalibrationError: an observer saw no data; every such observer is named.
        InvariantError: the result breaks the canonical form.
        UnsupportedError: its weights are quantized and its constants take no less for it, or it was
            prepared with int_only and computes in float.
    """
    state, bytes_before = prepared_state(prepared), constant_bytes(prepared)
    form = Form.CANONICAL if fold_quantize else Form.UNFOLDED
    with pause_gc(), torch.no_grad(), _marked_if_stopped(prepared):
        if state.is_qat:
            nn.Module.train(prepared, False)
            set_training_flags(prepared, False)  # convert ends with a recompile
        how = _How(
            fold_quantize=fold_quantize,
            progress=progress,
            is_calibrated=SAMPLE_KEY in prepared.meta
            or any(saw_data(graph) for graph in prepared_graphs(prepared)),
        )
        _convert_graph(prepared, how)
        run_passes(prepared, (lift_constants,))
        if fold_quantize and pack and run_passes(prepared, (pack_weights,))[0].changed:
            run_passes(prepared, (drop_dead_constants,))
        verify_canonical(prepared, form=form)
        for body in bodies(prepared):
            verify_canonical(body.gm, form=form)
        provenance_of(prepared).sizes = list(take_ledger(prepared))
        if fold_quantize:
            check_smaller(prepared, bytes_before, is_strict=state.is_strict)
        if state.int_only:
            refuse_float_operators(prepared)
    return prepared


@contextmanager
def _marked_if_stopped(gm: GraphModule) -> Iterator[None]:
    """Mark a graph whose convert is interrupted, because a second convert would be wrong."""
    try:
        yield
    except Exception:
        raise
    except BaseException:
        gm.meta[PREPARED_KEY] = HALF_CONVERTED
        raise


@dataclass(frozen=True, slots=True, kw_only=True)
class _How:
    """Options of the conversion.

    Args:
        fold_quantize: as `convert_pt2e` has it.
        progress: likewise.
        is_calibrated: the program ran in calibration, or some observer of it saw data.
    """

    fold_quantize: bool
    progress: bool
    is_calibrated: bool


def _convert_graph(gm: GraphModule, how: _How, *, is_body: bool = False) -> None:
    """Convert one graph, after the bodies of its control flow."""
    provenance = provenance_of(gm)
    for body in direct_bodies(gm):
        _convert_graph(body.gm, how, is_body=True)
        _add_body_records(provenance, provenance_of(body.gm), body.name)
    state = prepared_state(gm)
    gathered = take_statistics(gm, state.algorithms)
    gathered.progress = how.progress
    if is_body and how.is_calibrated and never_ran(gm):
        leave_float(gm)
        return
    check_gathered(state, gathered)
    with one_recompile(gm) as changes:
        log_passes(provenance, run_passes(gm, END_OF_TRAINING if state.is_qat else ()))
        log_passes(provenance, place_in_float(gm) if state.algorithms else ())
        log_passes(provenance, run_passes(gm, [as_pass(a, gathered) for a in state.algorithms]))
        changes.append(True)
        if state.is_qat or state.as_torchao:
            # Prepare left what is computed from parameters, so that these train.
            run_passes(gm, (fold_observed_constants,))
        run_passes(gm, (round_recurrent,))
        _Converter(gm, state, provenance, how).run()
        if state.as_torchao:
            run_passes(gm, (restore_in_place,))
            port_metadata(gm)
        del gm.meta[PREPARED_KEY]
        if how.fold_quantize:
            is_trained = state.is_qat and not state.as_torchao
            run_passes(gm, (fold_trained_constants,) if is_trained else ())
            run_passes(gm, (store_weights,))
        log_passes(provenance, run_passes(gm, (*state.placing, *state.finishing)))
        run_passes(gm, (drop_dead_constants,))


def _add_body_records(table: Provenance, inner: Provenance, body: str) -> None:
    """Add a body's records to those of the graph around it, under the body's name."""
    table.tensors += [replace(r, name=f"{body}/{r.name}") for r in inner.tensors]
    table.floats += [replace(r, node=f"{body}/{r.node}") for r in inner.floats]
    table.notes += [f"{body}/{note}" for note in inner.notes]


class _Converter:
    """One walk over the observer nodes, one recompile."""

    def __init__(
        self, gm: GraphModule, state: PreparedState, provenance: Provenance, how: _How
    ) -> None:
        self.gm = gm
        self.state = state
        self.observer_infos = dict(state.observer_infos)  # copies of the graph share the state
        self.provenance = provenance
        self.fold_quantize = how.fold_quantize
        self.progress = how.progress
        self.editor = Editor(gm)
        self.qparams: dict[int, QParams] = {}
        self.joint: dict[int, QParams] = {}
        self.records: dict[tuple[int, str], TensorRecord] = {}

    def run(self) -> None:
        """Convert every observer, then drop them."""
        self._convert_held()
        nodes = list(observers_of(self.gm))
        self.observer_infos |= infos_of_split(nodes, self.observer_infos, self.state.constants)
        constants = [one for one in nodes if self._observer_info(one[0]).is_constant]
        self.provenance.notes += show_constants(self.gm, constants, is_qat=self.state.is_qat)
        self.joint = qparams_by_observer(observer for _, observer in nodes)
        _check_seen(nodes, self.joint, self.state.is_strict)
        for node, observer in nodes:
            self._convert(node, observer)
        for node, _ in reversed(nodes):
            if not node._erased:
                self.gm.graph.erase_node(node)
            self.gm.delete_submodule(str(node.target))
        self.editor.finish()

    def _convert_held(self) -> None:
        """Convert the constants without observer nodes; unusual ones get an observer node first."""
        plain: list[HeldPlace] = []
        others: list[HeldPlace] = []
        for place in held_places(self.gm, self.state.constants):
            is_plain = self.fold_quantize and not hasattr(place.constant.observer, "block_qparams")
            (plain if is_plain else others).append(place)
        self.provenance.tensors += quantize_constants(
            self.gm, self.editor, plain, progress=self.progress
        )
        observers: dict[int, nn.Module] = {}
        for number, place in enumerate(others):
            group = place.constant.observer_info.group
            if group not in observers:
                observers[group] = copy.deepcopy(place.constant.observer)
            self._observe(f"constant_observer_{number}", place, observers[group])

    def _observe(self, name: str, place: HeldPlace, observer: nn.Module) -> None:
        """Give a held constant an observer node of its own."""
        self.gm.add_submodule(name, observer)
        with self.gm.graph.inserting_after(place.source):
            node = self.gm.graph.call_module(name, (place.source,))
        node.meta["val"] = place.source.meta["val"]
        copy_trace(node, place.like)
        for reader in place.readers:
            reader.replace_input_with(place.source, node)
        self.observer_infos[name] = place.constant.observer_info

    def _observer_info(self, node: Node) -> ObserverInfo:
        return self.observer_infos[str(node.target)]

    def _convert(self, node: Node, observer: Any) -> None:
        if not node.users:
            return  # the model computes a value that nothing reads
        source = observed_node(node)
        if self._convert_blocks(node, source, observer):
            return
        if self._convert_special(node, source, observer):
            return
        if getattr(observer, "is_dynamic", False):
            self._record(node, observer, {"is_dynamic": True})
            quantized = emit_dynamic(self.editor, node, source, observer)
            if self.state.as_torchao and is_affine_choice(observer):
                made = quantized.dequantize(self.editor, of=node)
                node.replace_all_uses_with(made)
                return
        else:
            qparams = self._qparams(self._observer_info(node), observer)
            self._record(node, observer, recorded(qparams))
            quantized = emit_static(self.editor, node, source, qparams)
        self._insert_dequantizes(node, quantized)

    def _convert_blocks(self, node: Node, source: Node, observer: Any) -> bool:
        """Convert an observer of blocks, small floats or code books; returns whether it was one."""
        if isinstance(observer, RunTimeScales):
            quantized = emit_run_time_scales(self.editor, node, source, observer.scheme)
        elif isinstance(observer, FloatActivationObserver):
            found = observer.block_qparams(node.meta["val"].dim())
            quantized = emit_blocks(self.editor, node, source, found)
        elif isinstance(observer, BlockWeightObserver):
            quantized = emit_blocks(self.editor, node, source, observer.block_qparams())
        else:
            return False
        dim = node.meta["val"].dim()
        self._record(node, observer, described(observer.scheme, dim))
        self._insert_dequantizes(node, quantized)
        return True

    def _convert_special(self, node: Node, source: Node, observer: Any) -> bool:
        """Convert an observer that has `convert` or a float dtype; returns whether it has."""
        if hasattr(observer, "convert"):
            # It brings operators of its own; it erases its node.
            if hasattr(observer, "target_dtype"):
                self._record(node, observer, recorded_affine(observer))
            before, after = node.prev, node.next
            observer.convert(self.gm, node)
            give_values(self.gm, self.editor.mode, before.next, after)
        elif observer.dtype == torch.float32:
            # How Quantizers write "stays float": a bias, mostly.
            node.replace_all_uses_with(source)
            self.provenance.notes.append(f"{source.name}: left float, as annotated")
        elif observer.dtype == torch.float16:
            node.replace_all_uses_with(emit_casts(self.editor, node, source, torch.float16))
        elif observer.dtype.is_floating_point and observer.dtype not in FLOAT8:
            raise UnsupportedError(
                f"{type(observer).__name__} asks for {observer.dtype}, which has no q/dq",
                node=source,
                fix="use an integer dtype, float8, float16, or float32 to leave it as it is",
            )
        else:
            return False
        return True

    def _qparams(self, observer_info: ObserverInfo, observer: Any) -> QParams:
        if observer_info.group not in self.qparams:
            self.qparams[observer_info.group] = self.joint.get(id(observer)) or qparams_of(
                observer, by_statistics=self.state.as_torchao
            )
        return self.qparams[observer_info.group]

    def _insert_dequantizes(self, node: Node, quantized: Quantized) -> None:
        """Give each annotated reader its own dequantize; the other readers share one."""
        readers = list(node.users)
        own = [u for u in readers if Q_ANNOTATION_KEY in u.meta and u.op != "call_module"]
        rest = [u for u in readers if Q_ANNOTATION_KEY not in u.meta or u.op == "call_module"]
        for group in [*([u] for u in own), *([rest] if rest else [])]:
            made = quantized.dequantize(self.editor, of=node)
            for user in group:
                user.replace_input_with(node, made)

    def _record(self, node: Node, observer: Any, qparams: dict[str, Any]) -> None:
        """Note what became of a tensor; `qparams` are the record's fields about them."""
        observer_info = self._observer_info(node)
        key = observer_info.group, observer_info.source
        if key in self.records:
            self.records[key].uses += observer_info.uses
            return
        name = f"{type(observer).__name__} {node.target}"
        seen = observed_range(observer)
        self.records[key] = record_of(observer_info, node, observer, name, qparams, seen)
        self.provenance.tensors.append(self.records[key])


def _check_seen(
    nodes: list[tuple[Node, Any]], known: Mapping[int, QParams], is_strict: bool
) -> None:
    blind = [node for node, o in nodes if id(o) not in known and not has_seen(o)]
    if not blind:
        return
    names = ", ".join(f"{n.name} on {observed_node(n).name}" for n in blind[:10])
    more = f" and {len(blind) - 10} more" if len(blind) > 10 else ""
    error = CalibrationError(
        f"{len(blind)} of {len(nodes)} observers saw no data: {names}{more}",
        node=observed_node(blind[0]),
        fix="calibrate(prepared, batches) with data that reaches them, before convert_pt2e",
    )
    if is_strict:
        raise error
    warnings.warn(str(error), Pt2eQuantWarning, stacklevel=2)
