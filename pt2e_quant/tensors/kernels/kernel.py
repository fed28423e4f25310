"""An entry of the dispatch table: what a kernel for quantized tensors takes, and what runs it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pt2e_quant.core.granularity import Granularity
from pt2e_quant.tensors.form import TensorForm


def takes_all(form: TensorForm) -> bool:
    """The condition of a kernel that has none besides its row."""
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorKernel:
    """One kernel.

    Args:
        name: what profiles and reports call it.
        op: "linear", "embedding" or "conv": what it computes.
        run: of (x, weight, bias) for a linear; the weight is the quantized tensor.
        layout: the layout of the weight.
        formats: names of the codes' formats, `TensorForm.format_name`; None for any.
        granularities: classes of granularity; None for any.
        has_input: whether it takes activations that the weight's form quantizes, or float ones.
        device: the type of the device.
        dtypes: of the activations.
        takes: what must hold of the weight's form besides.
    """

    name: str
    op: str
    run: Callable[..., Tensor]
    layout: str = "plain"
    formats: frozenset[str] | None = None
    granularities: tuple[type[Any], ...] | None = None
    has_input: bool = False
    device: str = "cpu"
    dtypes: tuple[torch.dtype, ...] = (torch.float32,)
    takes: Callable[[TensorForm], bool] = takes_all

    def fits(self, op: str, form: TensorForm, device: str, dtype: torch.dtype) -> bool:
        """True if it runs an operation with a weight of a form, on activations of a dtype."""
        granularity: Granularity = form.scheme.granularity
        of_kind = self.granularities is None or type(granularity) in self.granularities
        return (
            self.op == op
            and self.layout == form.layout
            and self.device == device
            and dtype in self.dtypes
            and (self.formats is None or form.format_name in self.formats)
            and of_kind
            and self.has_input == (form.input is not None)
            and self.takes(form)
        )
