"""Compute in float32 what a model computes in half precision, or in float64."""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.fx.node import map_aggregate
from torch.utils._pytree import tree_map_only

from pt2e_quant.core.errors import UnsupportedError
from pt2e_quant.core.qdq import is_dequantize
from pt2e_quant.graph.alias import mutated_roots, nested_graphs, roots, subgraph_of
from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.meta import attribute
from pt2e_quant.graph.ops import CASTS, aten, is_call
from pt2e_quant.graph.pipeline import HAS_VALUES, GraphPass, Note, PassResult

_HALF = (torch.float16, torch.bfloat16)
_LARGEST = torch.finfo(torch.float32).max
_CAST = (aten.to.dtype,)
_AUTOCAST = "wrap_with_autocast"
_POWERS = {
    getattr(aten.float_power, overload): getattr(aten.pow, overload)
    for overload in ("Tensor_Tensor", "Tensor_Scalar", "Scalar")
}
"""Operators that give float64 for any input, and those that give the dtype of their input."""


def compute_in_float32(kept: Collection[torch.dtype] = ()) -> GraphPass:
    """A pass that computes in float32 what a graph computes in half precision, or in float64.

    Half precision is replaced wherever it is, also where autocast or the model casts to it;
    float64 only in a model with float64 parameters. Inputs and results keep their dtype: they are
    cast. Parameters and buffers are new tensors; tied ones stay tied. Bodies of control flow
    are edited with the graph.

    Before:  y: bf16 = linear(x: bf16, weight: bf16)
    After:   y: bf16 = to(linear(to(x, f32), weight: f32), bf16)

    Args:
        kept: dtypes that are left as they are.
    """
    # A partial, not a closure, as all passes that take arguments.
    return GraphPass(
        "compute_in_float32", partial(_edit, kept=frozenset(kept)), needs=(HAS_VALUES,), gives=()
    )


def _edit(gm: GraphModule, kept: frozenset[torch.dtype]) -> PassResult:
    wanted = {*_HALF, *([torch.float64] if _is_double(gm) else [])} - kept
    dtypes = (dtype for graph in nested_graphs(gm) for dtype in _dtypes(graph))
    found = Counter(dtype for dtype in dtypes if dtype in wanted)
    if not found:
        return PassResult(changed=False)
    widener = _Widener(frozenset(found))
    widener.widen(gm, is_body=False)
    names = " and ".join(sorted(str(d).removeprefix("torch.") for d in found))
    text = (
        f"computed in float32: {sum(found.values())} values were {names} in the model "
        f"({widener.bytes_before:,} bytes of constants, {widener.bytes_after:,} in float32, from "
        "which sizes are counted); inputs and results keep their dtype"
    )
    return PassResult(changed=True, notes=(Note("model", text),))


def _is_double(gm: GraphModule) -> bool:
    """True if a model is in float64, by its parameters or the dequantizes of quantized ones."""
    weights = (n.meta["val"] for n in gm.graph.nodes if is_dequantize(n))
    return any(w.dtype is torch.float64 for w in (*gm.parameters(), *weights))


def _dtypes(gm: GraphModule) -> Iterator[torch.dtype]:
    """The dtypes that a graph computes with, without those of mere inputs and results."""
    for node in gm.graph.nodes:
        value = node.meta.get("val")
        for leaf in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(leaf, Tensor) and not _is_at_border(node):
                yield leaf.dtype


def _is_at_border(node: Node) -> bool:
    """True if a value is an input that casts alone read, or a cast that is a result alone."""
    if node.op == "placeholder":
        calls = [user for user in node.users if user.op != "output"]
        return all(is_call(user, (*_CAST, aten.copy_.default)) for user in calls)
    return is_call(node, _CAST) and all(user.op == "output" for user in node.users)


class _Widener:
    """Changes the dtypes of one graph and of the bodies in it.

    Args:
        dtypes: what becomes float32.
    """

    def __init__(self, dtypes: frozenset[torch.dtype]) -> None:
        self.dtypes = dtypes
        self.bytes_before = 0
        self.bytes_after = 0
        self.made: dict[Any, Tensor] = {}
        self.done: set[GraphModule] = set()

    def widen(self, gm: GraphModule, *, is_body: bool) -> None:
        """Edit a graph; the inputs and results of a body change their dtype with it."""
        if gm in self.done:
            return
        self.done.add(gm)
        editor = Editor(gm)
        before = {n: n.meta["val"].dtype for n in gm.graph.nodes if _is_tensor(n)}
        wide = {node: dtype for node, dtype in before.items() if dtype in self.dtypes}
        output = gm.graph.output_node()
        for node in list(gm.graph.nodes):
            body = subgraph_of(node)
            if body is not None:
                self.widen(body, is_body=True)
            elif node.op == "get_attr":
                self._widen_constant(gm, node)
            elif node.op == "call_function":
                self._widen_call(node, wide)
                if torch.float64 in self.dtypes and node.target in _POWERS:
                    _raise_in_float32(node, editor)
            if is_body or node.op not in ("placeholder", "output"):
                self._widen_value(node, editor)
        _keep_copies(editor, before, output if is_body else None)
        if not is_body:
            _cast_results(editor, wide)
            _cast_inputs(editor, wide)
        editor.changed = True
        editor.finish()

    def _widen_value(self, node: Node, editor: Editor) -> None:
        def widened(leaf: Tensor) -> Tensor:
            return editor.fake_like(leaf, torch.float32) if leaf.dtype in self.dtypes else leaf

        if "val" in node.meta:
            node.meta["val"] = tree_map_only(Tensor, widened, node.meta["val"])
            node.meta.pop("tensor_meta", None)

    def _widen_call(self, node: Node, wide: Mapping[Node, torch.dtype]) -> None:
        if node.target is aten.view.dtype and (node in wide or node.args[0] in wide):
            raise UnsupportedError(
                f"{node.name} reads the bits of floats that are to be computed in float32",
                node=node,
                fix="convert with .to(dtype) instead of .view(dtype), or export the model in "
                "float32 (model.float())",
            )
        args: Any = map_aggregate(node.args, self._argument)
        kwargs: Any = map_aggregate(node.kwargs, self._argument)
        if getattr(node.target, "__name__", "") == _AUTOCAST and args[1] in (None, torch.float32):
            device, dtype, _, *rest = args
            args = (device, dtype, False, *rest)  # is not enabled
        node.args, node.kwargs = args, kwargs

    def _argument(self, value: Any) -> Any:
        """An argument that asks for float32, and for a number that float32 holds."""
        if isinstance(value, torch.dtype):
            return torch.float32 if value in self.dtypes else value
        if type(value) is float and _LARGEST < abs(value) < float("inf"):
            return _LARGEST if value > 0 else -_LARGEST
        return value

    def _widen_constant(self, gm: GraphModule, node: Node) -> None:
        """Put a float32 copy in the place of a constant; the tensor itself is not written."""
        name = str(node.target)
        held = attribute(gm, name)
        if not isinstance(held, Tensor) or held.dtype not in self.dtypes:
            return
        is_parameter = isinstance(held, nn.Parameter)
        place = held.data_ptr() if held.numel() else id(held)
        key = place, held.shape, held.stride(), held.dtype, is_parameter
        if key not in self.made:
            made = held.detach().to(torch.float32)
            self.made[key] = nn.Parameter(made, held.requires_grad) if is_parameter else made
            self.bytes_before += held.nbytes
            self.bytes_after += made.nbytes
        owner, _, leaf = name.rpartition(".")
        setattr(gm.get_submodule(owner), leaf, self.made[key])


def _raise_in_float32(power: Node, editor: Editor) -> None:
    """Make a float_power a pow, of floats."""
    for operand in power.all_input_nodes:
        if not operand.meta["val"].is_floating_point():
            cast = editor.call(aten.to.dtype, operand, torch.float32, like=power, before=power)
            power.replace_input_with(operand, cast)
    power.target = _POWERS[power.target]


def _is_tensor(node: Node) -> bool:
    return isinstance(node.meta.get("val"), Tensor)


def _keep_copies(editor: Editor, before: Mapping[Node, torch.dtype], output: Node | None) -> None:
    """Replace casts that no longer change a dtype by copies where a copy is needed.

    That is where one of the two is written, or where a body (`output` is its output) returns it:
    results of bodies share no storage with their inputs.
    """
    written, root = mutated_roots(editor.graph), roots(editor.graph)
    for node, dtype in before.items():
        source = node.args[0] if is_call(node, CASTS) else None
        if not isinstance(source, Node) or before.get(source) in (None, dtype):
            continue
        is_returned = output is not None and output in node.users
        if node.meta["val"].dtype == source.meta["val"].dtype and (
            is_returned or root[node] in written
        ):
            editor.replace(node, editor.call(aten.clone.default, source, like=node))


def _cast_results(editor: Editor, wide: Mapping[Node, torch.dtype]) -> None:
    output = editor.graph.output_node()
    for node in output.all_input_nodes:
        if node in wide and node.op != "placeholder":
            cast = editor.call(aten.to.dtype, node, wide[node], like=node, before=output)
            output.replace_input_with(node, cast)


def _cast_inputs(editor: Editor, wide: Mapping[Node, torch.dtype]) -> None:
    """Cast the inputs once; one that the model writes is written at the end."""
    output, written = editor.graph.output_node(), mutated_roots(editor.graph)
    for node in [node for node in wide if node.op == "placeholder"]:
        # A quantize of the input may stand before the next input.
        cast = editor.call(aten.to.dtype, node, torch.float32, like=node, before=node.next)
        editor.replace(node, cast, except_in=[cast, output])
        if node in written:
            editor.call(aten.copy_.default, node, cast, like=node, before=output)
