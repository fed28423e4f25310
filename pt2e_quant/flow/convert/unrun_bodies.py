"""Bodies of control flow that calibration never ran: they stay float."""

from typing import Any

from torch.fx import GraphModule, Node

from pt2e_quant.core.provenance import provenance_of
from pt2e_quant.flow.convert.observed_qparams import has_seen
from pt2e_quant.flow.prepare.prepared import (
    PREPARED_KEY,
    observed_node,
    observers_of,
    prepared_state,
)


def saw_data(gm: GraphModule) -> bool:
    """Whether an observer of a prepared graph, of its bodies apart, saw data."""
    return any(has_seen(observer) for _, observer in _of_data(gm))


def never_ran(gm: GraphModule) -> bool:
    """Whether a body has observers that need data, and none of them saw any."""
    return bool(_of_data(gm)) and not saw_data(gm)


def leave_float(gm: GraphModule) -> None:
    """Take the observers out of a prepared body; its constants stay float, and a note says so."""
    for node, _ in list(observers_of(gm)):
        node.replace_all_uses_with(observed_node(node))
        gm.graph.erase_node(node)
        gm.delete_submodule(str(node.target))
    gm.recompile()
    del gm.meta[PREPARED_KEY]
    provenance_of(gm).notes.append(
        "this body: stays float, for no calibration batch ran it; give batches that do"
    )


def _of_data(gm: GraphModule) -> list[tuple[Node, Any]]:
    """The observers of a graph that need data: of no constant, and not dynamic."""
    observer_infos = prepared_state(gm).observer_infos
    return [
        (node, observer)
        for node, observer in observers_of(gm)
        if not observer_infos[str(node.target)].is_constant
        and not getattr(observer, "is_dynamic", False)
    ]
