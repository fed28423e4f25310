"""torch.export.export, without a remark that no user can act on."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram

_FLAT_WEIGHTS = (
    r"The tensor attributes? (self\.[\w.]*_flat_weights\[\d+\](, )?)+ (was|were) assigned"
)


def export(
    module: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic_shapes: Any = None,
) -> ExportedProgram:
    """Export a module, as torch does, but for its warning about `nn.LSTM` and its kind.

    torch 2.13 takes their list of weights for tensors that the model assigns.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", _FLAT_WEIGHTS, UserWarning)
        return torch.export.export(
            module, tuple(args), dict(kwargs or {}), dynamic_shapes=dynamic_shapes
        )
