"""The base class of layouts, and the two that need no kernel: plain, and packed without gaps."""

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor

from pt2e_quant.core.packing import pack, packed_shape, unpack
from pt2e_quant.tensors.form import TensorForm

Parts = dict[str, Tensor]


class Layout(ABC):
    """The memory layout of the parts of a quantized tensor.

    The plain layout is canonical: `codes`, one per element. Each layout is made of it and gives it
    back to the last bit.

    Attributes:
        name: of the layout.
        is_of_device: whether its parts differ with the kind of the device they are on.
    """

    name: str
    is_of_device: bool = False

    @abstractmethod
    def refusal(self, form: TensorForm) -> str:
        """Return the reason why a tensor cannot lie in it, "" if it can."""

    @abstractmethod
    def pack(self, parts: Mapping[str, Tensor], form: TensorForm) -> Parts:
        """Plain parts in this layout."""

    @abstractmethod
    def unpack(self, parts: Mapping[str, Tensor], form: TensorForm) -> Parts:
        """Parts of this layout as plain ones."""


class Plain(Layout):
    """One code per element, in the storage dtype of the format."""

    name = "plain"

    def refusal(self, form: TensorForm) -> str:
        """It takes every tensor."""
        return ""

    def pack(self, parts: Mapping[str, Tensor], form: TensorForm) -> Parts:
        """The same parts."""
        return dict(parts)

    def unpack(self, parts: Mapping[str, Tensor], form: TensorForm) -> Parts:
        """The same parts."""
        return dict(parts)


def code_dtype(form: TensorForm) -> torch.dtype:
    """The dtype that codes are packed as."""
    scheme = form.scheme
    return scheme.dtype if scheme.format is None else scheme.format.code_dtype


class Packed(Layout):
    """Codes of 1 to 7 bits without gaps, by row: the bytes of `core.packing`."""

    name = "packed"

    def refusal(self, form: TensorForm) -> str:
        """It takes codes below 8 bits."""
        return "" if form.scheme.bits < 8 else f"{form.format_name} has no gaps to take out"

    def pack(self, parts: Mapping[str, Tensor], form: TensorForm) -> Parts:
        """`codes` as `packed`."""
        made = {name: value for name, value in parts.items() if name != "codes"}
        if parts["codes"].is_meta:
            shape = packed_shape(form.shape, form.scheme.bits)
            return {"packed": torch.empty(shape, dtype=torch.uint8, device="meta")} | made
        return {"packed": pack(parts["codes"], code_dtype(form))} | made

    def unpack(self, parts: Mapping[str, Tensor], form: TensorForm) -> Parts:
        """`packed` as `codes`."""
        made = {name: value for name, value in parts.items() if name != "packed"}
        return {"codes": unpack(parts["packed"], code_dtype(form), form.shape)} | made
