"""Take the scales of a linear's input at run time where nothing around it works in integers."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.fx import Node

from pt2e_quant.core.specs import Q_ANNOTATION_KEY, QuantizationSpec
from pt2e_quant.graph.ops import (
    ADAPTIVE_AVG_POOL2D,
    LINEAR,
    MEAN,
    RESHAPE,
    SQUEEZE,
    argument,
    is_call,
)
from pt2e_quant.observers.run_time.placeholder import PerTokenPlaceholderObserver
from pt2e_quant.observers.statistics.base import Statistics
from pt2e_quant.passes.algorithms.algorithm import Algorithm, Site, Stage, record_float
from pt2e_quant.passes.algorithms.algorithm_graph import AlgorithmGraph, is_quantized_output
from pt2e_quant.passes.algorithms.grid import Declined

_POOLS = (*ADAPTIVE_AVG_POOL2D, *MEAN)
_VIEWS = (*RESHAPE, *SQUEEZE)

PER_TOKEN = QuantizationSpec(
    dtype=torch.int8,
    observer_or_fake_quant_ctr=PerTokenPlaceholderObserver,
    quant_min=-128,
    quant_max=127,
    is_dynamic=True,
)


@dataclass(frozen=True, slots=True)
class _Plan:
    """The nodes around a linear that become float.

    Args:
        end: the linear, or the clip that its annotation covers.
        behind: pools and views between the last operator in integers and the linear.
    """

    end: Node
    behind: tuple[Node, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTimeScales(Algorithm):
    """Take the scales of a linear's input at run time where nothing around it works in integers.

    A linear whose input is made in float and whose output is read in float needs a quantize and a
    dequantize anyway. A quantize that looks at each row clips nothing that calibration did not
    show, has steps as fine as the row allows, and the output is not rounded at all. So are linears
    that read pooled features: the pool computes in float, on few values.

    Before:  dequantize(quantize(linear(quantize(x, calibrated scale), w)))
    After:   linear(quantize(x, scale of each row), w)

    Args:
        spec: how the input is quantized: int8 with a scale per row.
        pooled_only: leave linears that read anything but the mean of a feature map. Calibration
            shows few of its values, and the product is small: it costs next to nothing also on
            runtimes that are slower with scales of run time.
    """

    name: ClassVar[str] = "run_time_scales"
    paper: ClassVar[str] = (
        "dynamic quantization per token, as Yao et al. 2022, ZeroQuant, arXiv 2206.01861, section "
        "4.1; where it is no slower"
    )
    fits: ClassVar[str] = (
        "linears with calibrated (static) 8-bit inputs and int8 weights, between float operators"
    )
    stage: ClassVar[Stage] = Stage.WEIGHTS
    needs_float: ClassVar[bool] = True

    spec: QuantizationSpec = PER_TOKEN
    pooled_only: bool = False

    def sites(self, graph: AlgorithmGraph) -> Iterable[Site]:
        """Every linear with static integers at its input."""
        shared = _shared(graph)
        for linear in graph.calls(LINEAR):
            if not _is_static(graph, linear):
                continue
            plan: _Plan | Declined
            try:
                plan = _plan(linear, shared, pooled_only=self.pooled_only)
            except Declined as reason:
                plan = reason
            yield Site(graph, linear, "input", plan)

    def apply(self, site: Site, statistics: Statistics | None) -> str:
        """Change the annotation of one linear."""
        plan: _Plan = site.plan
        linear = site.node
        for node in {linear, plan.end}:
            node.meta[Q_ANNOTATION_KEY].output_qspec = None
        specs = linear.meta[Q_ANNOTATION_KEY].input_qspec_map
        specs[argument(linear, "input")] = self.spec
        bias = argument(linear, "bias")
        if hasattr(specs.get(bias), "derive_qparams_fn"):
            del specs[bias]  # a multiple of a scale that is not known
        for node in (*plan.behind, *({plan.end} - {linear})):
            del node.meta[Q_ANNOTATION_KEY]
            reason = f"{self.name}: {linear.name} takes its scales at run time"
            record_float(site.graph, node, reason, is_choice=True)
        return f"{self.name}: a scale for each row at run time"


def _is_static(graph: AlgorithmGraph, linear: Node) -> bool:
    """True if an annotation gives a linear a static 8-bit input and int8 weights per row."""
    specs = getattr(linear.meta.get(Q_ANNOTATION_KEY), "input_qspec_map", {})
    weight: Any = specs.get(argument(linear, "weight"))
    is_per_row = (
        getattr(weight, "qscheme", None) is torch.per_channel_symmetric
        and weight.dtype is torch.int8
        and weight.ch_axis == 0
    )
    given = _resolved(specs.get(argument(linear, "input")))
    is_integer = getattr(given, "dtype", None) in (torch.int8, torch.uint8)
    return is_per_row and is_integer and not getattr(given, "is_dynamic", True)


def _resolved(spec: Any) -> Any:
    """The spec that a shared one stands for; torchao's are read by their structure."""
    seen: list[object] = []
    while (place := getattr(spec, "edge_or_node", None)) is not None and place not in seen:
        seen.append(place)
        reader = place if isinstance(place, Node) else place[1]
        annotation = reader.meta.get(Q_ANNOTATION_KEY)
        if isinstance(place, Node):
            spec = getattr(annotation, "output_qspec", None)
        else:
            spec = getattr(annotation, "input_qspec_map", {}).get(place[0])
    return spec


def _plan(linear: Node, shared: dict[Node, set[Node]], *, pooled_only: bool) -> _Plan:
    end = linear
    if not is_quantized_output(linear) and len(linear.users) == 1:
        (reader,) = linear.users
        if is_quantized_output(reader) and not _reads_integers(reader, linear):
            end = reader  # a clip that the annotation of the linear covers
    for reader in end.users:
        if _reads_integers(reader, end):
            raise Declined(f"{reader.name} reads it in integers")
    behind = _behind(linear, pooled_only=pooled_only)
    ours = {linear, end, *behind}
    others = set().union(*(shared.get(n, ()) for n in ours)) - ours
    if others:
        raise Declined(f"{min(n.name for n in others)} shares its range")
    return _Plan(end, behind)


def _behind(linear: Node, *, pooled_only: bool) -> tuple[Node, ...]:
    """The pools and views in integers that the input of a linear comes through."""
    behind: list[Node] = []
    node, is_pooled = argument(linear, "input"), False
    while is_call(node, (*_POOLS, *_VIEWS)):
        is_pooled = is_pooled or is_call(node, _POOLS)
        if is_quantized_output(node):
            if len(node.users) > 1:
                raise Declined(f"{node.name} is read by others too")
            behind.append(node)
        node = node.all_input_nodes[0]
    if not is_pooled and (behind or is_quantized_output(node)):
        raise Declined(f"{node.name} gives it integers")
    if pooled_only and not is_pooled:
        raise Declined("its input is no pooled feature")
    return tuple(behind)


def _reads_integers(reader: Node, source: Node) -> bool:
    return source in getattr(reader.meta.get(Q_ANNOTATION_KEY), "input_qspec_map", {})


def _shared(graph: AlgorithmGraph) -> dict[Node, set[Node]]:
    """The operators whose annotations share the range of each operator's tensors."""
    found: dict[Node, set[Node]] = {}
    for node in graph.gm.graph.nodes:
        annotation = node.meta.get(Q_ANNOTATION_KEY)
        specs = [*getattr(annotation, "input_qspec_map", {}).values()]
        for spec in (*specs, getattr(annotation, "output_qspec", None)):
            place = getattr(spec, "edge_or_node", None)
            if place is not None:
                owner = place if isinstance(place, Node) else place[1]
                found.setdefault(owner, set()).add(node)
    return found
