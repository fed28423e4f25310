"""A kernel as backends see it: an op-table entry, what builds the call, how fast it was."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from torch.fx import Node

from pt2e_quant.graph.op_table import OpRow
from pt2e_quant.graph.pattern import Match
from pt2e_quant.kernels.cost import Cost
from pt2e_quant.kernels.site import Site


class Device(StrEnum):
    """The device of a kernel; also the name of the backend that lowers to it."""

    CPU = "cpu"
    CUDA = "cuda"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """An entry of the registry.

    Args:
        row: what it stands for: pattern, schemes of every slot, constraints with their reasons.
        device: where it runs.
        op: the fused operator's name; `kernels/<op>` for our own.
        build: inserts the fused call for a match whose q/dq have the row's schemes, and returns
            the node that holds the result.
        shape_class: names the class of a match's sizes that the measured ratios are kept by; ""
            where a size that matters is symbolic.
        measured: shape class to speed over float on the device it was measured on; empty while
            it was measured nowhere.
        cost: bytes and operations of a fused call that `build` made.
        writes_e4m3: whether a result that its readers quantize to float8_e4m3fn is written so.
        lowest_capability: 89 for a kernel with fp8 products, which older GPUs do not have.
    """

    row: OpRow
    device: Device
    op: str
    build: Callable[[Site], Node]
    shape_class: Callable[[Match], str]
    cost: Callable[[Node], Cost]
    measured: Mapping[str, float] = field(default_factory=dict)
    writes_e4m3: bool = False
    lowest_capability: int = 80

    @property
    def name(self) -> str:
        """The row's name."""
        return self.row.name
