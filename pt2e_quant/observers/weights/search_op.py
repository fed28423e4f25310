"""The operator `pt2e_quant::search_scales`: a weight's scales in compiled training.

A compiler that follows the search would write each trial of each block of rows out.
"""

import torch
from torch import Tensor

from pt2e_quant.observers.weights.weight_search import Qparams, WeightSearch, search_qparams

_LIBRARY = torch.library.Library("pt2e_quant", "FRAGMENT")  # type: ignore[no-untyped-call]  # torch's own
_LIBRARY.define(  # type: ignore[no-untyped-call]
    "search_scales(Tensor rows, str search, int quant_min, int quant_max, bool symmetric) "
    "-> (Tensor, Tensor)"
)


def _run(rows: Tensor, search: str, quant_min: int, quant_max: int, symmetric: bool) -> Qparams:
    limits = {"quant_min": quant_min, "quant_max": quant_max}
    return search_qparams(rows, WeightSearch(search), symmetric=symmetric, **limits)


def _fake(rows: Tensor, search: str, quant_min: int, quant_max: int, symmetric: bool) -> Qparams:
    scale = rows.new_empty(rows.shape[0], dtype=torch.float32)
    return scale, torch.empty_like(scale, dtype=torch.int32)


torch.library.impl(_LIBRARY, "search_scales", "CompositeExplicitAutograd")(_run)
torch.library.register_fake("pt2e_quant::search_scales", lib=_LIBRARY)(_fake)

SearchScales = torch.ops.pt2e_quant.search_scales.default
"""`search_qparams` as an operator."""
