"""Fold operators that depend only on constants."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from pt2e_quant.core.qdq import is_dequantize, is_quantize
from pt2e_quant.graph.constant_values import ConstantValues
from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.meta import attribute, module_path
from pt2e_quant.graph.ops import (
    BATCH_NORM,
    CONV,
    CONV_TRANSPOSE,
    EMBEDDING,
    LINEAR,
    Overloads,
    arguments,
    is_call,
)
from pt2e_quant.graph.pipeline import HAS_VALUES, Note, PassResult, graph_pass
from pt2e_quant.graph.strides import has_plain_strides

GROWTH_LIMIT_BYTES = 1 << 20
"""The bytes that a folded constant may add over the constants that it makes superfluous."""

_LAYERS: Overloads = CONV + CONV_TRANSPOSE + LINEAR + EMBEDDING + BATCH_NORM


@dataclass(slots=True)
class _Cone:
    """A folded node with everything it is computed from."""

    known: ConstantValues
    nodes: set[Node] = field(default_factory=set)
    sources: list[Node] = field(default_factory=list)

    def grow(self, top: Node) -> "_Cone":
        stack = [top]
        while stack:
            node = stack.pop()
            if node in self.nodes:
                continue
            self.nodes.add(node)
            if node.op == "get_attr":
                self.sources.append(node)
            stack.extend(self.known.inputs(node))
        return self

    def freed(self) -> list[Node]:
        """The sources that nothing outside reads."""
        return [s for s in self.sources if all(u in self.nodes for u in s.users)]


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


class _Folder:
    def __init__(self, gm: GraphModule, *, through_qdq: bool = False) -> None:
        self.gm = gm
        self.editor = Editor(gm)
        self.known = ConstantValues(gm, through_qdq=through_qdq)
        self.foldable = self.known.nodes
        self.keys: dict[Node, str] = {}
        self.same: dict[str, Node] = {}
        self.constants: dict[str, Node] = {}
        self.folded: list[Node] = []
        self.notes: list[Note] = []

    def run(self, is_wanted: Callable[[Node], bool]) -> PassResult:
        for node in list(self.gm.graph.nodes):
            is_computed = node.op == "call_function" and node in self.foldable
            if not is_computed or self.known.is_plain_fill(node):
                continue
            if isinstance(node.meta["val"], Tensor) and is_wanted(node):
                self._fold(node)
        self._erase_written()
        return PassResult(changed=self.editor.finish(), notes=tuple(self.notes))

    def _erase_written(self) -> None:
        """Erase tensors that were made and written for what is folded now."""
        if self.known.written:
            self.editor.erase_dead(self.folded)
        for nodes in self.known.written.values():
            if all(user in nodes for node in nodes for user in node.users):
                self.editor.discard(nodes)

    def _fold(self, node: Node) -> None:
        self.folded.append(node)
        key = self._key(node)
        if key not in self.constants:
            cone = _Cone(self.known).grow(node)
            size = _bytes([node.meta["val"]])
            freed = cone.freed()
            growth = size - _bytes(n.meta["val"] for n in freed)
            if growth > GROWTH_LIMIT_BYTES:
                reason = f"folding would add {growth} bytes"
                self.notes.append(Note(node.name, reason, skipped=True))
                return
            constant = self.constants[key] = self._constant(node, freed)
            # Values further on are computed from it; its name may be that of what it is made of.
            self.keys[constant] = key
            self.known.put(constant, self.known.value(node))
        self.editor.replace(node, self.constants[key])
        self.notes.append(Note(node.name, "folded"))

    def _constant(self, node: Node, freed: list[Node]) -> Node:
        tensor = self.known.value(node)
        source = freed[0] if len(freed) == 1 and len(freed[0].users) == 1 else None
        if source is not None and source.meta["val"].numel() != tensor.numel():
            source = None  # no longer what the name says
        shares = tensor.untyped_storage().data_ptr() in self._held(node)
        if shares or tensor._base is not None or not has_plain_strides(tensor):
            tensor = tensor.clone(memory_format=torch.contiguous_format)
        if source is not None:
            return self.editor.rebind(source, tensor, reader=next(iter(source.users)))
        reader = next((u for u in node.users if u not in self.foldable), next(iter(node.users)))
        return self.editor.constant(self._name(node, reader), tensor, like=node)

    def _held(self, node: Node) -> set[int]:
        """The storages that the module holds, which a new constant must not share."""
        return {
            attribute(self.gm, str(s.target)).untyped_storage().data_ptr()
            for s in _Cone(self.known).grow(node).sources
        }

    def _name(self, node: Node, reader: Node) -> str:
        """The name of the reader's argument, in the reader's module."""
        path = module_path(reader)
        argument = next((k for k, v in arguments(reader).items() if v is node), "value")
        name = argument if argument in ("weight", "bias") and path else f"folded_{argument}"
        return f"{path}.{name}" if path and attribute(self.gm, path) is not None else name

    def _key(self, node: Node) -> str:
        """Equal for nodes that compute the same from the same constants."""
        if node not in self.keys:
            if node.op == "get_attr":
                self.keys[node] = str(node.target)
            elif self.known.has_own_value(node):
                self.keys[node] = node.name
            else:
                args = map_arg(node.args, self._first_equal)
                kwargs = map_arg(node.kwargs, self._first_equal)
                self.keys[node] = repr((str(node.target), args, kwargs))
        return self.keys[node]

    def _first_equal(self, node: Node) -> Node:
        return self.same.setdefault(self._key(node), node)


@graph_pass(needs=(HAS_VALUES,), gives=())
def fold_constants(gm: GraphModule) -> PassResult:
    """Replace values that are computed only from constants by constants.

    Weight parametrizations, casts that autocast added and causal masks become plain constants.
    Quantize and dequantize stay. A value much larger than the constants it replaces stays computed.

    Before:  w = mul(v, g); y = conv2d(x, w)    where v and g are constants
    After:   y = conv2d(x, conv.weight)
    """
    return _folded(gm, lambda reader: True)


@graph_pass(needs=(HAS_VALUES,), gives=())
def fold_layer_constants(gm: GraphModule) -> PassResult:
    """Do as `fold_constants`, only for operands of convs, linears, embeddings and batch norms."""
    return _folded(gm, lambda reader: is_call(reader, _LAYERS))


@graph_pass(needs=(HAS_VALUES,), gives=())
def fold_observed_constants(gm: GraphModule) -> PassResult:
    """Do as `fold_constants`, only for inputs of observers."""
    return _folded(gm, lambda reader: reader.op == "call_module")


@graph_pass(needs=(HAS_VALUES,), gives=())
def fold_trained_constants(gm: GraphModule) -> PassResult:
    """Replace what layers and quantized operators make of quantized constants alone by constants.

    Prepare folds it where nothing is trained: the first step of a loop from a state of zeros.
    Where float operators alone read its integers, it becomes the values of these.

    Before:  y_q = quantize(linear(dequantize(state_q), dequantize(weight_q), bias))
    After:   y_q = quantize(y)    where y is a constant
    """
    folder = _Folder(gm, through_qdq=True)
    trained: set[Node] = set()
    made: set[Node] = set()
    wanted: set[Node] = set()
    for node in [n for n in gm.graph.nodes if n in folder.foldable]:
        is_made = not made.isdisjoint(node.all_input_nodes)
        if is_dequantize(node) or not trained.isdisjoint(node.all_input_nodes):
            trained.add(node)
        if is_dequantize(node) or is_quantize(node):
            made.update([node] if is_made else [])
            is_wanted = is_dequantize(node) and is_made and not any(map(_is_quantized, node.users))
        else:
            is_layer = is_call(node, _LAYERS) or any(map(is_quantize, node.users))
            is_wanted = node in trained and is_layer
        if is_wanted:
            wanted.add(node)
            made.add(node)
    return folder.run(wanted.__contains__)


def _is_quantized(reader: Node) -> bool:
    """True if integers of a constant serve its reader."""
    return is_call(reader, _LAYERS) or any(map(is_quantize, reader.users))


def _folded(gm: GraphModule, is_wanted_by: Callable[[Node], bool]) -> PassResult:
    folder = _Folder(gm)
    return folder.run(
        lambda node: any(is_wanted_by(u) for u in node.users if u not in folder.foldable)
    )
