"""Store constants as the integers their quantize op makes of them."""

from typing import Any

from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from pt2e_quant.core.provenance import Provenance, provenance_of
from pt2e_quant.core.qdq import QUANTIZE_OPS, is_quantize
from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.meta import constant_of, source_constant
from pt2e_quant.graph.pipeline import Note, PassResult, graph_pass

__all__ = ["store_weights"]


@graph_pass()
def store_weights(gm: GraphModule) -> PassResult:
    """Fold each quantize of a constant into an integer constant.

    Before:  quantize(permute(weight), scale, zero_point, …)
    After:   weight_q

    The integers are named after the parameter they come from. Constants that share storage and
    qparams (tied weights) become one. The float constant stays until nothing reads it.
    """
    editor = Editor(gm)
    made: dict[tuple[Any, ...], Node] = {}
    notes = []
    sizes: dict[str, tuple[int, int]] = {}
    for node in [n for n in gm.graph.nodes if is_quantize(n)]:
        source = node.args[0]
        value = constant_of(gm, source) if isinstance(source, Node) else None
        if value is None or not all(_is_constant(gm, a) for a in node.args[1:]):
            continue
        assert isinstance(source, Node)
        name = _name(source)
        key = _key(gm, node, value)
        if key not in made:
            integers = _integers(gm, node, value)
            made[key] = editor.constant(f"{name}_q", integers, like=node)
            after = _bytes(integers) + sum(
                _bytes(v) for a in node.args[1:] if (v := _tensor(gm, a)) is not None
            )
            sizes[name] = _bytes(value), after
            notes.append(Note(node.name, f"{name}: {_bytes(value)} -> {after} bytes"))
        editor.replace(node, made[key])
    _note_sizes(provenance_of(gm), sizes)
    return PassResult(editor.finish(), tuple(notes))


def _name(source: Node) -> str:
    constant = source_constant(source)
    return source.name if constant is None else str(constant.target)


def _tensor(gm: GraphModule, argument: object) -> Tensor | None:
    return constant_of(gm, argument) if isinstance(argument, Node) else None


def _is_constant(gm: GraphModule, argument: object) -> bool:
    return not isinstance(argument, Node) or _tensor(gm, argument) is not None


def _integers(gm: GraphModule, node: Node, value: Tensor) -> Tensor:
    arguments = map_arg(node.args[1:], lambda n: constant_of(gm, n))
    target: Any = node.target
    assert target in QUANTIZE_OPS
    # A copy: a clamp that changes nothing must not hand out the user's own storage.
    return target(value.contiguous(), *arguments).detach().clone()  # type: ignore[no-any-return]


def _key(gm: GraphModule, node: Node, value: Tensor) -> tuple[Any, ...]:
    """Equal for constants of one storage with equal qparams."""
    qparams = tuple(
        tuple(tensor.flatten().tolist()) if (tensor := _tensor(gm, a)) is not None else a
        for a in node.args[1:]
    )
    layout = value.data_ptr(), tuple(value.shape), value.stride(), value.dtype
    return (node.target, layout, qparams)


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _note_sizes(provenance: Provenance, sizes: dict[str, tuple[int, int]]) -> None:
    for record in provenance.tensors:
        if record.name in sizes:
            record.size_before, record.size_after = sizes[record.name]
