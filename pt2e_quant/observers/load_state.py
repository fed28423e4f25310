"""State dicts of older observers, brought to the names and shapes of today's.

Version 1 had no eps, version 2 called the ranges of per-channel observers min_vals and max_vals
and gave a range without data no element, where today's per-tensor observers hold infinities.
"""

from typing import Any

import torch
from torch import Tensor

from pt2e_quant.core.qparams import DEFAULT_EPS

__all__ = ["upgrade_state"]

_OLD_NAMES = {"min_vals": "min_val", "max_vals": "max_val"}
_UNSEEN = {"min_val": torch.inf, "max_val": -torch.inf}


def upgrade_state(
    state_dict: dict[str, Any], prefix: str, version: int | None, *, has_channels: bool
) -> None:
    """Rewrite the entries of one observer in place; today's version is left alone.

    Args:
        state_dict: the whole state dict.
        prefix: what the names of the observer start with.
        version: of the observer's metadata; None if it has none.
        has_channels: the observer's range is per channel.
    """
    if version is not None and version >= 3:
        return
    holds_range = any(prefix + name in state_dict for name in (*_OLD_NAMES, *_UNSEEN))
    if holds_range and (version is None or version < 2):
        state_dict.setdefault(prefix + "eps", torch.tensor([DEFAULT_EPS]))
    for old, new in _OLD_NAMES.items():
        if prefix + old in state_dict:
            state_dict[prefix + new] = state_dict.pop(prefix + old)
    for name, unseen in _UNSEEN.items():
        value = state_dict.get(prefix + name)
        if isinstance(value, Tensor) and value.shape == (0,) and not has_channels:
            state_dict[prefix + name] = torch.tensor(unseen)
