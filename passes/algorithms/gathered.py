"""What the algorithms of one model know of each other."""

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.fx import Node

from pt2e_quant.observers.statistics.base import Statistics
from pt2e_quant.observers.statistics.kept_inputs import KeptCalls, KeptInputs


@dataclass(slots=True)
class Gathered:
    """Statistics from calibration, and state that consecutive algorithms share.

    Args:
        statistics: by the name of the algorithm, the operator and the slot.
        floats: the values of constants before an algorithm made them fit their quantization, by the
            `get_attr` node; only while something is to be compared with the float model.
        observers: those of constants before an algorithm fixed their scales, by observer node.
        least_scales: that the integers of constants may have, by observer node.
        progress: show progress bars of long steps on a terminal.
    """

    statistics: dict[tuple[str, Node, str], Statistics] = field(default_factory=dict)
    floats: dict[Node, Tensor] = field(default_factory=dict)
    observers: dict[Node, nn.Module] = field(default_factory=dict)
    least_scales: dict[Node, Tensor] = field(default_factory=dict)
    progress: bool = False

    @property
    def kept(self) -> KeptCalls | None:
        """The calls of calibration that were kept; None where no algorithm asked for them."""
        kept = (s.calls for s in self.statistics.values() if isinstance(s, KeptInputs))
        return next(kept, None)

    @property
    def calls(self) -> dict[Node, list[Any]]:
        """The values of each graph input in the kept random sample of calls."""
        found = self.statistics.items()
        return {key[1]: kept.kept for key, kept in found if isinstance(kept, KeptInputs)}
