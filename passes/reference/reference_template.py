"""A graph prepared for training as the q/dq graph that it will become, to match rules on."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from pt2e_quant.core.dtypes import limits_of, used_limits
from pt2e_quant.core.qdq import (
    DequantizePerChannel,
    DequantizePerTensor,
    QuantizePerChannel,
    QuantizePerTensor,
)
from pt2e_quant.graph.meta import constant_nodes, fake_cast
from pt2e_quant.graph.ops import DROPOUT, arguments, aten, is_call, is_getitem
from pt2e_quant.observers.qschemes import PER_CHANNEL
from pt2e_quant.observers.training.trained_qparams import is_fake_quantize
from pt2e_quant.passes.batch_norm.trained_batch_norm import FoldedConstants, TrainedBatchNorm


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedTensor:
    """A tensor that a fake-quantize of the prepared graph makes integers of.

    Args:
        observer: name of the fake-quantize's node in the prepared graph.
        codes: the template's node of the integers: a quantize, or a constant.
        axis: of its channels, None per tensor.
        limits: quant_min and quant_max.
        storage: dtype of the integers.
        scale: of channels, the template's constant; None per tensor.
        zero_point: likewise.
    """

    observer: str
    codes: Node
    axis: int | None
    limits: tuple[int, int]
    storage: torch.dtype
    scale: Node | None = None
    zero_point: Node | None = None

    def arguments(self, scale: Any, zero_point: Any) -> tuple[Any, ...]:
        """The arguments of its quantize and dequantizes after their tensor."""
        axis = () if self.axis is None else (self.axis,)
        return scale, zero_point, *axis, *self.limits, self.storage


@dataclass(slots=True)
class ReferenceTemplate:
    """The q/dq graph; its constants and qparams are set anew for each evaluation.

    Args:
        gm: in canonical form, with the names of the prepared graph's nodes.
        tensors: by the template's node of their integers.
        sources: names of the prepared graph's nodes by the template's node of the same value.
        norms: targets of batch norms by the operator that computes them, which they are folded
            into if it is another.
        rounded: targets of observers that convert makes integers of by qparams derived from
            others', by the template's node of the constant (a bias).
        behind_dropout: the template's nodes that read a dropout in the prepared graph.
    """

    gm: GraphModule
    tensors: dict[Node, TrainedTensor] = field(default_factory=dict)
    sources: dict[Node, str] = field(default_factory=dict)
    norms: dict[Node, str] = field(default_factory=dict)
    rounded: dict[Node, str] = field(default_factory=dict)
    behind_dropout: set[Node] = field(default_factory=set)


def has_static_integers(module: object) -> bool:
    """True if a fake-quantize makes integers with constant qparams, per tensor or per channel."""
    if not is_fake_quantize(module) or hasattr(module, "scheme"):
        return False
    is_plain = not getattr(module, "is_dynamic", False) and getattr(module, "dtype", None) not in (
        None,
        torch.float32,
        torch.float16,
    )
    is_float_zero = getattr(module, "qscheme", None) == torch.per_channel_affine_float_qparams
    return is_plain and not is_float_zero and getattr(module, "group_size", None) is None


def is_plain_dropout(node: Node) -> bool:
    """True if a node is a dropout that gives no mask beside its result."""
    return is_call(node, DROPOUT) and isinstance(node.meta.get("val"), Tensor)


def _drops(node: Node) -> bool:
    """True if a node is a dropout whose probability is not 0."""
    return is_plain_dropout(node) and arguments(node)["p"] != 0


def reference_template(gm: GraphModule) -> ReferenceTemplate:
    """Write a prepared graph with q/dq in the places of its fake-quantizes.

    Before:  y = fq_2(relu(conv2d(fq_0(x), fq_1(w), b)))
    After:   y = quantize(relu(conv2d(dequantize(quantize(x)), dequantize(w_codes), b)))

    Every reader has a dequantize of its own. Batch norms that are folded are gone, and so are
    dropouts, as in the converted graph. What rules cannot see through is a placeholder.
    """
    return _Writer(gm).run()


class _Writer:
    def __init__(self, gm: GraphModule) -> None:
        self.gm = gm
        self.graph = Graph()
        self.constants = constant_nodes(gm.graph)
        self.made: dict[Node, Node] = {}
        """The template's node of each value; of fake-quantized ones, that of the integers."""
        self.template = ReferenceTemplate(GraphModule(nn.Module(), self.graph))

    def run(self) -> ReferenceTemplate:
        for node in self.gm.graph.nodes:
            if node.op == "output":
                self.graph.output(map_arg(node.args[0], self._read))
                continue
            self.made[node] = made = self._write(node)
            if any(map(_drops, node.all_input_nodes)):
                self.template.behind_dropout.add(made)
            if made not in self.template.tensors:
                self.template.sources.setdefault(made, node.name)
        return self.template

    def _write(self, node: Node) -> Node:
        module = self.gm.get_submodule(str(node.target)) if node.op == "call_module" else None
        if module is not None and isinstance(source := node.args[0], Node):
            if has_static_integers(module):
                return self._quantize(node, module, source)
            if isinstance(module, TrainedBatchNorm):
                return self._norm(node, module, source)
            if hasattr(module, "obs_or_fqs") and self._is_fixed(source):
                return self._rounded(node, source)
            if hasattr(module, "calculate_qparams"):
                return self.made[source]  # left float
        if is_plain_dropout(node):
            return self.made[node.all_input_nodes[0]]
        if self._is_fixed(node):
            return self._constant(node.name, node)
        if node.op == "call_function" and "val" in node.meta:
            args, kwargs = map_arg(node.args, self._read), map_arg(node.kwargs, self._read)
            made = self.graph.create_node(node.op, node.target, args, kwargs, node.name)
            return self._named(made, node)
        return self._named(self.graph.placeholder(node.name), node)

    def _norm(self, node: Node, module: TrainedBatchNorm, source: Node) -> Node:
        """A batch norm as the converted graph has it: in its convolution, or by itself."""
        if module.is_folded:
            made = self.made[source]
        else:
            state = map_arg(node.args[3:7], self._read)
            args = self._read(source), *state, False, module.momentum, module.eps, True
            called = self.graph.create_node(
                "call_function", aten.batch_norm.default, args, {}, node.name
            )
            made = self._named(called, node)
        self.template.norms[made] = str(node.target)
        return made

    def _rounded(self, node: Node, source: Node) -> Node:
        made = self._constant(node.name, source)
        self.template.rounded[made] = str(node.target)
        self.template.sources[made] = source.name
        return made

    def _is_fixed(self, node: Node) -> bool:
        """True if a value is constant once training has ended."""
        return node in self.constants or self._is_folded(node)

    def _is_folded(self, node: Node) -> bool:
        """True if a value is a weight or bias with its batch norm in it."""
        made = node.args[0] if is_getitem(node) else None
        if not isinstance(made, Node) or made.op != "call_module":
            return False
        return isinstance(self.gm.get_submodule(str(made.target)), FoldedConstants)

    def _named(self, made: Node, like: Node) -> Node:
        made.meta = dict(like.meta)
        return made

    def _constant(self, name: str, like: Node, value: Tensor | None = None) -> Node:
        name = name.replace(".", "_")
        self.template.gm.register_buffer(name, value)
        made = self._named(self.graph.get_attr(name), like)
        if value is not None:
            made.meta["val"] = value
        return made

    def _quantize(self, node: Node, module: Any, source: Node) -> Node:
        dtype = module.dtype
        limits = limits_of(dtype)
        is_per_channel = module.qscheme in PER_CHANNEL
        axis = int(module.ch_axis) if is_per_channel else None
        scale = zero_point = None
        if axis is not None:
            count = int(node.meta["val"].shape[axis])
            scale = self._constant(f"{node.name}_scale", node, torch.ones(count))
            zeros = torch.zeros(count, dtype=torch.int64)
            zero_point = self._constant(f"{node.name}_zero_point", node, zeros)
        given: dict[str, Any] = {
            "observer": node.name,
            "axis": axis,
            "limits": used_limits(module),
            "storage": limits.storage,
            "scale": scale,
            "zero_point": zero_point,
        }
        value = fake_cast(node.meta["val"], limits.storage)
        if self._is_fixed(source):
            codes = self._constant(f"{node.name}_codes", node)
        else:
            held = (1.0, 0) if axis is None else (scale, zero_point)
            draft = TrainedTensor(codes=self.made[source], **given)
            do = QuantizePerTensor if axis is None else QuantizePerChannel
            codes = self.graph.call_function(do, (self._read(source), *draft.arguments(*held)))
            codes.meta = dict(node.meta)
        codes.meta["val"] = value
        self.template.tensors[codes] = TrainedTensor(codes=codes, **given)
        return codes

    def _read(self, node: Node) -> Node:
        """A value as a reader takes it: of integers, a dequantize of its own."""
        made = self.made[node]
        tensor = self.template.tensors.get(made)
        if tensor is None:
            return made
        if tensor.axis is None:
            args = tensor.arguments(1.0, 0)
        else:
            args = tensor.arguments(tensor.scale, tensor.zero_point)
        undo = DequantizePerTensor if tensor.axis is None else DequantizePerChannel
        read = self.graph.call_function(undo, (made, *args))
        read.meta = dict(node.meta)
        return read
