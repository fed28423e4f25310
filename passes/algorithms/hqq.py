"""HQQ: ranges of weights with the least p-norm of the rounding error, without data."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from pt2e_quant.core.specs import Q_ANNOTATION_KEY
from pt2e_quant.graph.ops import CONV, LINEAR, argument
from pt2e_quant.observers.partial_wrapper import given_argument
from pt2e_quant.observers.qschemes import PER_CHANNEL
from pt2e_quant.observers.statistics.base import Statistics
from pt2e_quant.observers.weights.weight import WeightObserver
from pt2e_quant.observers.weights.weight_search import WeightSearch
from pt2e_quant.passes.algorithms.algorithm import Algorithm, Site, Stage
from pt2e_quant.passes.algorithms.algorithm_graph import AlgorithmGraph
from pt2e_quant.passes.algorithms.grid import Declined


@dataclass(frozen=True, slots=True, kw_only=True)
class Hqq(Algorithm):
    """Let HQQ find the scales of weights, by whichever quantizer they were annotated.

    The search itself is `observers.weights.weight_search`, which `search="hqq"` names too; this
    asks for it in place of the observer that an annotation names.
    """

    name: ClassVar[str] = "hqq"
    paper: ClassVar[str] = "Badri & Shaji 2023, Half-Quadratic Quantization of Large ML Models"
    fits: ClassVar[str] = "linears and convolutions with weights in integers per row or group"
    stage: ClassVar[Stage] = Stage.SCALES

    def sites(self, graph: AlgorithmGraph) -> Iterable[Site]:
        """Every weight whose annotation asks for integers per row or group."""
        for node in graph.calls((*LINEAR, *CONV)):
            spec = _spec(node)
            if getattr(spec, "observer_or_fake_quant_ctr", None) is None:
                continue
            if getattr(spec, "qscheme", None) in PER_CHANNEL and not spec.dtype.is_floating_point:
                yield Site(graph, node, "weight")

    def apply(self, site: Site, statistics: Statistics | None) -> str:
        """Name the search in the annotation of one weight."""
        spec = _spec(site.node)
        asked = spec.observer_or_fake_quant_ctr
        if given_argument(asked, "observer") is not None:
            raise Declined("its scales are rounded by an observer of their own")
        size = given_argument(asked, "group_size")
        layout = {} if size is None else {"group_size": size}
        made = WeightObserver.with_args(search=WeightSearch.HQQ, **layout)
        specs = site.node.meta[Q_ANNOTATION_KEY].input_qspec_map
        specs[argument(site.node, "weight")] = replace(spec, observer_or_fake_quant_ctr=made)
        return "hqq finds its scales"


def _spec(node: Any) -> Any:
    """The spec of an operator's weight in its annotation; None without one."""
    specs = getattr(node.meta.get(Q_ANNOTATION_KEY), "input_qspec_map", {})
    return specs.get(argument(node, "weight"))
