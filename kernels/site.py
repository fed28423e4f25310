"""One place in a canonical graph where a fused call goes."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.meta import fake_cast
from pt2e_quant.graph.ops import CONV, is_call
from pt2e_quant.graph.pattern import Match
from pt2e_quant.kernels.profiler_range import label_of
from pt2e_quant.kernels.quantized_values import Affine


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """A match that a kernel takes the place of.

    Args:
        editor: of the graph; constants and calls are inserted through it.
        match: operators and operands; quantized operands are their dequantize nodes.
        place: the node before which the fused call goes.
        output: qparams of the result, where all that reads it quantizes it to the same static
            ones; None where it stays float.
        readers: those quantizes.
    """

    editor: Editor
    match: Match
    place: Node
    output: Affine | None
    readers: tuple[Node, ...] = field(default=())

    @property
    def gm(self) -> GraphModule:
        """The module that is being edited."""
        return self.editor.gm

    @property
    def source(self) -> Node:
        """The operator that the match is named after: "op" in its pattern, else the anchor."""
        return self.match.nodes.get("op", self.match.anchor)

    @property
    def label(self) -> str:
        """The module path, node and layout of the result, for the profiler."""
        layout = "channels_last" if is_call(self.source, CONV) else "contiguous"
        return f"{label_of(self.source)} {layout}".strip()

    def integers(self, name: str) -> Node:
        """The integers behind the dequantize that a variable of the pattern stands for."""
        source = self.match.node(name).args[0]
        assert isinstance(source, Node)
        return self.editor.now(source)

    def chosen_qparams(self, name: str) -> tuple[Node, Node]:
        """Scale and zero point that a dequantize takes from what chose them, float32 and int32.

        A fused choice gives them so; torch's own operators give float64 and int64, where no
        fused one may be used.
        """
        scale, zero_point = self.match.node(name).args[1:3]
        assert isinstance(scale, Node)  # of a dynamic scheme, by its form
        assert isinstance(zero_point, Node)
        return self._cast(scale, torch.float32), self._cast(zero_point, torch.int32)

    def _cast(self, node: Node, dtype: torch.dtype) -> Node:
        value = self.editor.now(node)
        if value.meta["val"].dtype is dtype:
            return value
        fake = fake_cast(value.meta["val"], dtype)
        to = torch.ops.aten.to.dtype
        return self.editor.call(to, value, dtype, like=value, before=self.place, val=fake)

    def constant(self, name: str, value: Tensor) -> Node:
        """A new buffer, named after the operator, as a node."""
        return self.editor.constant(f"{self.source.name}.{name}", value, like=self.match.anchor)

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        """The fused call, with the fake value of the result in its dtype."""
        anchor = self.match.anchor
        value = anchor.meta["val"]
        if self.output is not None:
            value = fake_cast(value, self.output.dtype)
        return self.editor.call(target, *args, like=anchor, before=self.place, val=value, **kwargs)
