"""How fast a kernel was against float, by device and shape class: JSON that a benchmark wrote."""

import json
from collections.abc import Mapping
from functools import cache
from importlib.resources import files

__all__ = ["read_measured"]


@cache
def read_measured(op: str, device: str) -> Mapping[str, float]:
    """Shape class to speed over float, from `kernels/<op>/measured/<device>.json`.

    Args:
        op: the unit's folder.
        device: a GPU's name as `tiles.device_slug` writes it.

    Returns:
        Ratios above 1 where the kernel was faster (than what would run instead, where there is no
        float form); empty if it was never measured there.
    """
    file = files("pt2e_quant.kernels").joinpath(op, "measured", f"{device}.json")
    if not file.is_file():
        return {}
    return {name: float(ratio) for name, ratio in json.loads(file.read_text()).items()}
