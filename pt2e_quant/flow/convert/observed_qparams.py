"""Read what calibration gathered: qparams, records of tensors, and what no data reached."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from pt2e_quant.core.dtypes import DTYPES
from pt2e_quant.core.errors import CalibrationError, module_path
from pt2e_quant.core.provenance import TensorRecord, provenance_of
from pt2e_quant.core.qparams import QParams
from pt2e_quant.core.schemes import Role
from pt2e_quant.flow.prepare.prepared import (
    PREPARED_KEY,
    HeldConstant,
    ObserverInfo,
    PreparedState,
    observed_node,
    observers_of,
    prepared_state,
)
from pt2e_quant.passes.algorithms.algorithm_graph import STEPS_KEY
from pt2e_quant.passes.algorithms.gathered import Gathered
from pt2e_quant.passes.algorithms.own_ranges import SPLIT_KEY
from pt2e_quant.passes.algorithms.saturation_limits import NARROWED_KEY, Narrowed


def record_of(
    observer_info: ObserverInfo,
    node: Node,
    observer: Any,
    name: str,
    fields: dict[str, Any],
    observed: tuple[float, float] | None,
) -> TensorRecord:
    """The record of a tensor.

    Args:
        observer_info: what it is observed for.
        node: whose module it belongs to.
        observer: its observer.
        name: of the observer.
        fields: those about its qparams.
        observed: least and greatest value.
    """
    narrowed: Narrowed | None = node.meta.get(NARROWED_KEY)
    return TensorRecord(
        name=observer_info.source,
        role=observer_info.role,
        module=module_path(node),
        rule=observer_info.rule,
        group=observer_info.group,
        observer=name,
        uses=list(observer_info.uses),
        dtype=fields.pop("dtype", None) or str(observer.dtype).removeprefix("torch."),
        observed=observed if narrowed is None else narrowed.observed,
        read_range=None if narrowed is None else narrowed.read,
        steps=[*node.meta.get(STEPS_KEY, ()), *getattr(observer, "steps", ())],
        evidence=getattr(observer, "evidence", ""),
        **fields,
    )


def recorded(qparams: QParams) -> dict[str, Any]:
    """The fields of a record that hold qparams; those of groups are left to the graph."""
    is_grouped = qparams.group_size is not None
    return {
        "quant_min": qparams.quant_min,
        "quant_max": qparams.quant_max,
        "axis": qparams.axis,
        "group_size": qparams.group_size,
        "scale": [] if is_grouped else qparams.scale.tolist(),
        "zero_point": [] if is_grouped else qparams.zero_point.tolist(),
    }


def recorded_affine(observer: Any) -> dict[str, Any]:
    """The fields of a record for an observer with torchao's affine granularity, ours or theirs."""
    limits = DTYPES.get(observer.target_dtype)
    least, most = (limits.quant_min, limits.quant_max) if limits is not None else (0, 0)
    return {
        "dtype": str(observer.target_dtype).removeprefix("torch."),
        "quant_min": least if observer.quant_min is None else int(observer.quant_min),
        "quant_max": most if observer.quant_max is None else int(observer.quant_max),
        "block": list(observer.block_size or ()),
        "is_dynamic": bool(getattr(observer, "is_dynamic", False)),
    }


def infos_of_split(
    nodes: Iterable[tuple[Node, Any]],
    infos: Mapping[str, ObserverInfo],
    constants: Iterable[HeldConstant],
) -> dict[str, ObserverInfo]:
    """The tensors of observers that an algorithm split from those of prepare.

    Args:
        nodes: the observer nodes with their observers.
        infos: by name of the observer node, as prepare has them.
        constants: those that no node observes.
    """
    split = [(n, observer, str(n.meta[SPLIT_KEY])) for n, observer in nodes if SPLIT_KEY in n.meta]
    if not split:
        return {}
    last = max(i.group for i in (*infos.values(), *(held.observer_info for held in constants)))
    groups: dict[int, int] = {}
    found: dict[str, ObserverInfo] = {}
    for _, observer, like in [one for one in split if one[0].target == one[2]]:
        group = groups.setdefault(id(observer), last + len(groups) + 1)
        found[like] = replace(infos[like], group=group)
    for node, observer, like in [one for one in split if one[0].target != one[2]]:
        info = infos[like]
        group = groups.get(id(observer), info.group)
        uses = tuple(f"{info.source} -> {user.name}" for user in node.users)
        found[str(node.target)] = replace(info, group=group, role=Role.INPUT, uses=uses)
    return found


def has_seen(observer: Any) -> bool:
    """True if an observer has the data it needs."""
    if getattr(observer, "is_dynamic", False):
        return True
    # A fake-quantize of another library says nothing itself.
    observer = getattr(observer, "activation_post_process", observer)
    seen = getattr(observer, "seen", None)
    if seen is not None:
        return bool(seen)
    low = getattr(observer, "min_val", None)
    return not isinstance(low, Tensor) or (low.numel() > 0 and bool((low != torch.inf).any()))


def observed_range(observer: Any) -> tuple[float, float] | None:
    """The least and greatest value that an observer saw, None if it keeps none."""
    observer = getattr(observer, "activation_post_process", observer)
    low, high = getattr(observer, "min_val", None), getattr(observer, "max_val", None)
    if not isinstance(low, Tensor) or not isinstance(high, Tensor) or low.numel() == 0:
        return None
    if low.numel() == 1:  # the same, in half the time
        return low.item(), high.item()
    return float(low.min()), float(high.max())


def saw_data(gm: GraphModule) -> bool:
    """True if an observer of a prepared graph, of its bodies apart, saw data."""
    return any(has_seen(observer) for _, observer in _of_data(gm))


def never_ran(gm: GraphModule) -> bool:
    """True if a body has observers that need data, and none of them saw any."""
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


def check_gathered(state: PreparedState, gathered: Gathered) -> None:
    """Refuse an algorithm that was asked for and was given no data, or none that is finite."""
    for (name, node, _), statistics in gathered.statistics.items():
        if name in state.asked_algorithms and not statistics.is_finite:
            raise CalibrationError(
                f"NaN or infinity in what {name} gathered of the calibration data",
                node=node,
                fix="find the batch or operator that makes it; algorithms need finite values",
            )
    seen = {key[0] for key, statistics in gathered.statistics.items() if statistics.seen}
    for name, node, _ in gathered.statistics:
        if name in state.asked_algorithms and name not in seen:
            raise CalibrationError(
                f"{name} needs calibration data, and its operators got none",
                node=node,
                fix="calibrate(prepared, batches) before convert_pt2e, also where the recipe "
                f"needs no data itself; or leave {name} out",
            )
