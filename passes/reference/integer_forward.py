"""Nodes of a prepared graph whose forward pass is the integer form of the operator before them."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.fx import GraphModule, Node

from pt2e_quant.core.provenance import provenance_of
from pt2e_quant.core.qparams import dequantize, quantize
from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.meta import copy_trace
from pt2e_quant.graph.ops import DROPOUT, is_call
from pt2e_quant.graph.pipeline import HAS_VALUES, Note, PassResult, graph_pass
from pt2e_quant.observers.training.trained_qparams import live_qparams, qparams_of
from pt2e_quant.passes.reference.integer_regions import find_regions, region_of
from pt2e_quant.passes.reference.reference_template import has_static_integers, reference_template


@torch.library.custom_op("pt2e_quant::integer_forward", mutates_args=())
def integer_forward(
    estimate: Tensor, real: Tensor, values: list[Tensor], qparams: list[Tensor], region: str
) -> Tensor:
    """The exact result of a region, with the gradient of its estimate (straight-through).

    Args:
        estimate: what the region's float operators give at the same values.
        real: what is quantized to the estimate; the estimate itself if the result stays float.
        values: what the region reads, in real units.
        qparams: scale, zero_point and flag of each of its fake-quantizes.
        region: as text, see `integer_regions`.

    Returns:
        Shaped like estimate, which it equals where the region has no integer form.
    """
    exact = region_of(region).compute(estimate, real, values, qparams)
    # In the layout of the estimate, as the fake kernel promises.
    return torch.empty_like(estimate).copy_(estimate if exact is None else exact)


@integer_forward.register_fake
def _fake_integer_forward(
    estimate: Tensor, real: Tensor, values: list[Tensor], qparams: list[Tensor], region: str
) -> Tensor:
    return torch.empty_like(estimate)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.counts = len(inputs[2]), len(inputs[3])


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    values, qparams = ctx.counts
    return grad, None, [None] * values, [None] * qparams, None


integer_forward.register_autograd(_backward, setup_context=_setup_context)


class IntegerForward(nn.Module):
    """The exact result of a region in its forward pass; the gradient is its float estimate's.

    Off, or while a batch norm inside normalises by the batch's own statistics, or while a dropout
    in front drops, it is the estimate.

    Args:
        name: of the region's operator.
        region: as text.
        observers: the fake-quantizes of what it reads and makes, in the region's order.
        norms: the batch norms folded into it.
        rounded: for each value that is not fake-quantized, the observer whose qparams convert
            rounds it by, None if it does not.
        behind_dropout: whether a dropout in front drops in training: no integers stand for what
            it leaves.
    """

    def __init__(
        self,
        name: str,
        region: str,
        observers: Sequence[nn.Module],
        norms: Sequence[nn.Module],
        rounded: Sequence[nn.Module | None],
        behind_dropout: bool = False,
    ) -> None:
        super().__init__()
        self.name = name
        self.region = region
        # In tuples they are no submodules: they are the graph's own already.
        self.observers = tuple(observers)
        self.norms = tuple(norms)
        self.rounded = tuple(rounded)
        self.behind_dropout = behind_dropout
        self.is_on = False

    @property
    def is_integer(self) -> bool:
        """True if the next forward pass is in integers."""
        drops = self.behind_dropout and self.training
        return self.is_on and not drops and not any(norm.is_normalising for norm in self.norms)

    def forward(self, estimate: Tensor, real: Tensor, *values: Tensor) -> Tensor:
        """The exact result at these values.

        Args:
            estimate: the region's result in fake-quantized float.
            real: what is quantized to it; the estimate itself if the result stays float.
            values: what the region reads.
        """
        if not self.is_integer:
            return estimate
        qparams: list[Tensor] = []
        for observer in self.observers:
            qparams += live_qparams(observer)
        first = len(values) - len(self.rounded)
        others = [_as_converted(v, o) for v, o in zip(values[first:], self.rounded, strict=True)]
        given = [*values[:first], *others]
        result: Tensor = integer_forward(estimate, real, given, qparams, self.region)
        return result

    def extra_repr(self) -> str:
        """Shown by print."""
        return f"{self.name}, is_on={self.is_on}"


def _as_converted(value: Tensor, observer: nn.Module | None) -> Tensor:
    """A constant as the converted graph holds it."""
    if observer is None:
        return value
    with torch.no_grad():
        qparams = qparams_of(observer)
        return dequantize(quantize(value, qparams), qparams)


def insert_integer_forwards(gm: GraphModule) -> list[IntegerForward]:
    """Put a node behind every operator of a prepared graph that has an integer form; all are off.

    Before:  y = fq_2(conv2d(fq_0(x), fq_1(w), b));  z = reader(y)
    After:   x_int = integer_forward_0(fq_0(x), x);  c = conv2d(x_int, fq_1(w), b);  y = fq_2(c)
             y_int = integer_forward_1(y, c, x_int, fq_1, b);  z = reader(y_int)

    Quantizes of other values have one too. Nothing is inserted where no operator has a form.
    Operators that read fake-quantized tensors and have none are in the provenance's notes. The
    caller recompiles.
    """
    regions = find_regions(reference_template(gm))
    known = {name for region in regions for name in (region.name, *region.covers)}
    provenance_of(gm).notes += _float_operators(gm, known)
    if not any(region.has_form for region in regions):
        return []
    # By name: a node that stands behind another takes its place for all who read it.
    latest = {node.name: node for node in gm.graph.nodes}
    nodes = dict(latest)
    made = []
    for number, region in enumerate(regions):
        module = IntegerForward(
            region.name,
            region.text,
            [gm.get_submodule(str(nodes[name].target)) for name in region.observers],
            [gm.get_submodule(target) for target in region.norms],
            [None if t is None else gm.get_submodule(t) for t in region.rounded],
            region.behind_dropout,
        ).train(gm.training)
        target = f"integer_forward_{number}"
        gm.add_submodule(target, module)
        end = nodes[region.end]
        real = end.args[0] if region.end in region.observers else end
        with gm.graph.inserting_after(end):
            node = gm.graph.call_module(target, (end, real, *(latest[n] for n in region.inputs)))
        node.meta["val"] = end.meta["val"]
        copy_trace(node, end)
        end.replace_all_uses_with(node, lambda user, new=node: user is not new)
        latest[region.end] = node
        made.append(module)
    return made


def _float_operators(gm: GraphModule, known: set[str]) -> list[str]:
    """Say of each operator without an integer form that it trains by fake-quantize."""
    return [
        f"{node.name}: trains by fake-quantize, it has no integer form here"
        for node in gm.graph.nodes
        if isinstance(node.target, OpOverload)
        and isinstance(node.meta.get("val"), Tensor)
        and not is_call(node, DROPOUT)
        and node.name not in known
        and any(_is_quantized(gm, source) for source in node.all_input_nodes)
    ]


def _is_quantized(gm: GraphModule, node: Node) -> bool:
    while is_call(node, DROPOUT):
        node = node.all_input_nodes[0]
    return node.op == "call_module" and has_static_integers(gm.get_submodule(str(node.target)))


@graph_pass(needs=(HAS_VALUES,), gives=())
def drop_integer_forwards(gm: GraphModule) -> PassResult:
    """Take the nodes out again, for convert: the q/dq of their operators say the same.

    Before:  y_int = integer_forward_0(y, fq_0, fq_1, b);  z = reader(y_int)
    After:   z = reader(y)
    """
    editor = Editor(gm)
    notes = []
    for node in list(gm.graph.nodes):
        if node.op != "call_module":
            continue
        module: Any = gm.get_submodule(str(node.target))
        if isinstance(module, IntegerForward):
            estimate = node.args[0]
            assert isinstance(estimate, Node)
            notes.append(Note(module.name, "trained in integers" if module.is_on else "was off"))
            node.replace_all_uses_with(estimate)
            gm.graph.erase_node(node)
            gm.delete_submodule(str(node.target))
            editor.changed = True
    return PassResult(editor.finish(), tuple(notes))
