"""Store constants as the integers that their quantize gives."""

from collections import Counter
from collections.abc import Container, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from pt2e_quant.core.affine_ops import is_affine_quantize
from pt2e_quant.core.provenance import Provenance, provenance_of
from pt2e_quant.core.qdq import FLOAT_NAME_KEY, STATIC_KINDS, is_quantize, kind_of_qdq, read_qparams
from pt2e_quant.core.qparams import QParams, quantize
from pt2e_quant.graph.alias import mutated_buffers
from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.held_constants import held_bytes, held_constant
from pt2e_quant.graph.meta import attribute, constant_of, source_constant
from pt2e_quant.graph.pipeline import Note, PassResult, graph_pass

QUANTIZATION_TAG = "quantization_tag"
"""The key of `node.meta` under which torchao's backends say what a node belongs to."""


@graph_pass(needs=(), gives=())
def store_weights(gm: GraphModule) -> PassResult:
    """Fold each quantize of a constant into an integer constant.

    Before:  quantize(permute(weight), scale, zero_point, …)
    After:   weight_q

    torchao's quantize_affine is folded alike. The integers are named after the parameter they come
    from. Constants that share storage and qparams (tied weights) become one. A float constant goes
    as soon as nothing reads it.
    """
    found = [n for n in gm.graph.nodes if is_quantize(n) or is_affine_quantize(n)]
    written = mutated_buffers(gm)
    waiting = [n for n in found if _reads_constant(n, written)]
    if not waiting:
        return PassResult(changed=False)
    store = WeightStore(gm, Editor(gm))
    for node in waiting:
        store.fold(node)
    _note_sizes(provenance_of(gm), store.sizes)
    return PassResult(store.editor.finish(), tuple(store.notes))


def _reads_constant(node: Node, written: Container[str]) -> bool:
    """True if a quantize reads a constant or a view of one that the graph does not write."""
    source = node.args[0]
    constant = source_constant(source) if isinstance(source, Node) else None
    return constant is not None and str(constant.target) not in written


class WeightStore:
    """Stores constants as integers, one by one; a float constant is freed after its last reader.

    So no more than one of them is in use at a time, and memory falls from the first weight on where
    nobody else holds them.

    Args:
        gm: whose constants it stores.
        editor: edits its graph; `finish` is the caller's.
    """

    def __init__(self, gm: GraphModule, editor: Editor) -> None:
        self.gm = gm
        self.editor = editor
        self.made: dict[tuple[Any, ...], Node] = {}
        self.put_at: dict[object, list[tuple[QParams, Node]]] = {}
        self.notes: list[Note] = []
        self.sizes: dict[str, tuple[int, int]] = {}
        reads = [str(n.target) for n in gm.graph.nodes if n.op == "get_attr"]
        self.readers = Counter(reads)
        # Taken before anything is freed: a later tensor may get the address of an earlier one.
        self.storages = {
            target: value.untyped_storage().data_ptr()
            for target in self.readers
            if isinstance(value := attribute(gm, target), Tensor)
        }

    def fold(self, node: Node) -> None:
        """Put integers in the place of a quantize, if all it reads is constant."""
        source = node.args[0]
        if not isinstance(source, Node):
            return
        value, qparams = constant_of(self.gm, source), _values(self.gm, node.args[1:])
        if value is None or qparams is None:
            return
        name = qdq_name(source)
        key = (node.target, self._place(source, value), *_plain(qparams))
        if key not in self.made:
            integers = _integers(self.gm, node, value, qparams)
            self.made[key] = self._hold(name, integers, node)
            _port_tag(self.made[key], node)
            nodes = [a for a in node.args[1:] if isinstance(a, Node)]
            after = _bytes(integers) + sum(held_bytes(self.gm, a) for a in nodes)
            self.sizes[name] = _bytes(value), after
            self.notes.append(Note(node.name, f"{name}: {_bytes(value)} -> {after} bytes"))
        self.editor.replace(node, self.made[key])
        self.erase_if_unread(node)

    def put(self, source: Node, value: Tensor, qparams: QParams, *, like: Node) -> Node:
        """The node of a constant's integers; one for all constants of equal bits and qparams.

        Args:
            source: the node that holds the constant.
            value: what it holds.
            qparams: to quantize it by.
            like: the node whose module stack and stack trace the integers' node takes.
        """
        found = self.put_at.setdefault(self._place(source, value), [])
        for known, node in found:
            if _are_equal(known, qparams):
                return node
        integers = quantize(value.contiguous(), qparams)
        made = self._hold(qdq_name(source), integers, like)
        found.append((qparams, made))
        return made

    def _hold(self, name: str, integers: Tensor, like: Node) -> Node:
        made = self.editor.constant(f"{name}_q", integers, like=like)
        made.meta[FLOAT_NAME_KEY] = name
        return made

    def erase_if_unread(self, node: Node) -> None:
        """Erase a node if nothing reads it, and its constant from the module."""
        constant = source_constant(node if node.op == "get_attr" else node.all_input_nodes[0])
        self.editor.erase_dead([node])
        if constant is not None and constant._erased:
            self._release(str(constant.target))

    def _place(self, source: Node, value: Tensor) -> object:
        """A key that is equal for equal views of one storage."""
        constant = source_constant(source)
        held = None if constant is None else attribute(self.gm, str(constant.target))
        pointer = value.untyped_storage().data_ptr()
        if held is None or held.untyped_storage().data_ptr() != pointer:
            return source  # made anew each time it is asked for, by a cast
        layout = value.storage_offset(), tuple(value.shape), value.stride(), value.dtype
        return self.storages[str(constant.target)], layout  # type: ignore[union-attr]  # held is its value

    def _release(self, target: str) -> None:
        """Take a constant out of the module once no node reads it."""
        self.readers[target] -= 1
        owner, _, leaf = target.rpartition(".")
        if not self.readers[target]:
            delattr(self.gm.get_submodule(owner), leaf)


def _port_tag(node: Node, like: Node) -> None:
    if QUANTIZATION_TAG in like.meta:
        node.meta[QUANTIZATION_TAG] = like.meta[QUANTIZATION_TAG]


def _are_equal(a: QParams, b: QParams) -> bool:
    """True if two qparams map every value to the same integer."""
    plain = ("quant_min", "quant_max", "dtype", "axis", "group_size")
    if any(getattr(a, name) != getattr(b, name) for name in plain):
        return False
    return torch.equal(a.scale, b.scale) and torch.equal(a.zero_point, b.zero_point)


def qdq_name(source: Node) -> str:
    """The dotted name that the integers and qparams of a node are stored under, before a suffix."""
    constant = source_constant(source)
    return source.name if constant is None else str(constant.target)


def _values(gm: GraphModule, arguments: Sequence[Any]) -> tuple[Any, ...] | None:
    """Arguments with the constants of their nodes; None if one is not constant."""
    held = {a: held_constant(gm, a) for a in arguments if isinstance(a, Node)}
    if any(value is None for value in held.values()):
        return None
    return tuple(held[a] if isinstance(a, Node) else a for a in arguments)


def _integers(gm: GraphModule, node: Node, value: Tensor, qparams: Sequence[Any]) -> Tensor:
    if kind_of_qdq(node) in STATIC_KINDS:
        # The same integers as the op's, in a sixth of its time and without its float copies.
        return quantize(value.contiguous(), read_qparams(gm, node))
    target: Any = node.target
    # A copy: a clamp that changes nothing must not hand out the user's own storage.
    return target(value.contiguous(), *qparams).detach().clone()  # type: ignore[no-any-return]


def _plain(qparams: Sequence[Any]) -> list[object]:
    """Qparams as plain values that can be compared."""
    # As bytes by way of uint8: numpy has no bfloat16.
    return [
        v.contiguous().reshape(-1).view(torch.uint8).numpy(force=True).tobytes()
        if isinstance(v, Tensor)
        else v
        for v in qparams
    ]


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _note_sizes(provenance: Provenance, sizes: dict[str, tuple[int, int]]) -> None:
    for record in provenance.tensors:
        if record.name in sizes:
            record.size_before, record.size_after = sizes[record.name]
