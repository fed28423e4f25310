"""What an observer has come to: its qparams, and what the record of a tensor says of it."""

from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from pt2e_quant.core.dtypes import DTYPES
from pt2e_quant.core.errors import module_path
from pt2e_quant.core.provenance import TensorRecord
from pt2e_quant.core.qparams import QParams
from pt2e_quant.flow.prepare.prepared import ObserverInfo
from pt2e_quant.passes.algorithms.algorithm_graph import STEPS_KEY


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
    return TensorRecord(
        name=observer_info.source,
        role=observer_info.role,
        module=module_path(node),
        rule=observer_info.rule,
        group=observer_info.group,
        observer=name,
        uses=list(observer_info.uses),
        dtype=fields.pop("dtype", None) or str(observer.dtype).removeprefix("torch."),
        observed=observed,
        steps=[*node.meta.get(STEPS_KEY, ()), *getattr(observer, "steps", ())],
        **fields,
    )


def recorded(qparams: QParams) -> dict[str, Any]:
    """What a record says of qparams; those of groups are too many to say them twice."""
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
    """What a record says of an observer with torchao's affine granularity, ours or theirs."""
    row = DTYPES.get(observer.target_dtype)
    least, most = (row.quant_min, row.quant_max) if row is not None else (0, 0)
    return {
        "dtype": str(observer.target_dtype).removeprefix("torch."),
        "quant_min": least if observer.quant_min is None else int(observer.quant_min),
        "quant_max": most if observer.quant_max is None else int(observer.quant_max),
        "block": list(observer.block_size or ()),
        "is_dynamic": bool(getattr(observer, "is_dynamic", False)),
    }


def has_seen(observer: Any) -> bool:
    """Whether an observer has the data it needs."""
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
