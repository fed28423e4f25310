"""What can take a factor per channel for a linear's input: a norm, rows, a multiplication."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.fx import GraphModule, Node

from pt2e_quant.core.errors import module_path
from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.idioms.rms_norm import RMS_NORM, is_normalized
from pt2e_quant.graph.meta import constant_of
from pt2e_quant.graph.ops import LINEAR, MUL, RELU, argument, aten, is_call

__all__ = [
    "Constants",
    "Multiplication",
    "Rows",
    "Target",
    "divide",
    "own_weight",
    "readers_of_storage",
    "rebind",
    "target_of",
]


@dataclass(frozen=True, slots=True)
class Constants:
    """The weight and bias of a norm: they are divided by the factors."""

    producer: Node
    nodes: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Rows:
    """A linear whose output channels are divided; a relu behind it takes no negative factor."""

    linear: Node
    keeps_sign: bool


@dataclass(frozen=True, slots=True)
class Multiplication:
    """A multiplication of its own before the linears: others read the norm's output too."""

    source: Node


Target = Constants | Rows | Multiplication


def readers_of_storage(gm: GraphModule) -> Mapping[int, int]:
    """How often each constant is read, under any name, by the address of its storage."""
    found: dict[int, int] = {}
    for node in gm.graph.find_nodes(op="get_attr"):
        value = constant_of(gm, node)
        if value is not None:
            address = value.untyped_storage().data_ptr()
            found[address] = found.get(address, 0) + len(node.users)
    return found


def own_weight(gm: GraphModule, linear: Node, readers: Mapping[int, int]) -> Tensor | str:
    """The weight of a linear, or the reason why it cannot be changed."""
    node = argument(linear, "weight")
    value = constant_of(gm, node)
    if node.op != "get_attr" or value is None or value.dim() != 2:
        return f"the weight of {linear.name} is no constant matrix"
    if readers[value.untyped_storage().data_ptr()] > 1:
        return f"the weight of {linear.name} is tied"
    return value


def target_of(
    gm: GraphModule,
    source: Node,
    linears: Sequence[Node],
    readers: Mapping[int, int],
    roots: Collection[Node],
) -> Target | str:
    """What takes the factors of an input, or why nothing does.

    Args:
        gm: the graph's module.
        source: the input.
        linears: its readers whose weights are multiplied.
        readers: as `readers_of_storage` gives them.
        roots: of the graph's norms, as `find_roots` gives them.
    """
    is_alone = set(source.users) == set(linears)
    constants = _norm_constants(gm, source, readers, roots)
    if constants is not None:
        return Constants(source, constants) if is_alone and constants else Multiplication(source)
    rows = _rows_behind(source)
    if rows is None:
        return f"{source.name} is made by no norm, linear or product with a linear"
    if not is_alone or len(rows.linear.users) > 1:
        return f"{rows.linear.name} is read by others too"
    own = own_weight(gm, rows.linear, readers)
    if isinstance(own, str):
        return own
    bias = argument(rows.linear, "bias")
    if bias is not None and _own_constant(gm, bias, readers) is None:
        return f"the bias of {rows.linear.name} is no constant of its own"
    return rows


def _own_constant(gm: GraphModule, node: Node, readers: Mapping[int, int]) -> Tensor | None:
    """A tensor that one node alone reads; what a call writes has the write as another reader."""
    value = constant_of(gm, node) if node.op == "get_attr" else None
    is_own = value is not None and readers[value.untyped_storage().data_ptr()] == 1
    return value if is_own else None


def _norm_constants(
    gm: GraphModule, source: Node, readers: Mapping[int, int], roots: Collection[Node]
) -> tuple[Node, ...] | None:
    """The constants of a norm, empty if they cannot take factors; None if this is no norm."""
    width = source.meta["val"].shape[-1]
    if is_call(source, MUL):
        operands = source.all_input_nodes
        if len(operands) != 2 or not any(is_normalized(_uncast(n), roots) for n in operands):
            return None
        return tuple(n for n in operands if _is_vector(gm, n, width, readers))
    if not is_call(source, (aten.layer_norm.default, *RMS_NORM)):
        return None
    names = ("weight", "bias") if is_call(source, (aten.layer_norm.default,)) else ("weight",)
    held = [argument(source, name) for name in names]
    if held[0] is None or len(argument(source, "normalized_shape")) != 1:
        return ()
    found = tuple(node for node in held if node is not None)
    return found if all(_is_vector(gm, node, width, readers) for node in found) else ()


def _uncast(node: Node) -> Node:
    while is_call(node, (aten.to.dtype, aten._to_copy.default)):
        node = node.all_input_nodes[0]
    return node


def _is_vector(gm: GraphModule, node: Node, width: int, readers: Mapping[int, int]) -> bool:
    value = _own_constant(gm, node, readers)
    return value is not None and value.numel() == width == value.shape[-1]


def _rows_behind(source: Node) -> Rows | None:
    """The linear whose rows take factors: itself, before a relu, or as a factor of a product."""
    if is_call(source, LINEAR):
        return Rows(source, keeps_sign=False)
    if is_call(source, RELU):
        linear = source.all_input_nodes[0]
        return Rows(linear, keeps_sign=True) if is_call(linear, LINEAR) else None
    if is_call(source, MUL):
        first, second = (argument(source, name) for name in ("other", "self"))
        for node in (first, second):
            if isinstance(node, Node) and is_call(node, LINEAR) and first is not second:
                return Rows(node, keeps_sign=False)
    return None


def rebind(editor: Editor, reader: Node, node: Node, change: Callable[[Tensor], Tensor]) -> None:
    """Give one reader of a constant another, computed in float64 and rounded once."""
    value = constant_of(editor.gm, node)
    assert value is not None  # target_of and own_weight have read it
    new = editor.rebind(node, change(value.double()).to(value.dtype), reader=reader)
    reader.replace_input_with(node, new)


def divide(editor: Editor, target: Target, factors: Tensor, linears: Sequence[Node]) -> None:
    """Divide the input of linears by factors float64[C]."""
    if isinstance(target, Constants):
        for node in target.nodes:
            rebind(editor, target.producer, node, lambda value: value / factors)
    elif isinstance(target, Rows):
        made = target.linear
        rebind(editor, made, argument(made, "weight"), lambda weight: weight / factors[:, None])
        if (bias := argument(made, "bias")) is not None:
            rebind(editor, made, bias, lambda value: value / factors)
    else:
        _multiply(editor, target.source, factors, linears)


def _multiply(editor: Editor, source: Node, factors: Tensor, linears: Sequence[Node]) -> None:
    first, value = linears[0], source.meta["val"]
    owner = module_path(first)
    name = f"{owner}.input_scale" if owner else "input_scale"
    factor = editor.constant(name, (1 / factors).to(value.dtype), like=first)
    scaled = editor.call(aten.mul.Tensor, source, factor, like=first, before=first, val=value)
    for linear in linears:
        linear.replace_input_with(source, scaled)
