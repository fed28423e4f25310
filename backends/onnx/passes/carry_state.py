"""State that a call writes, as inputs and outputs of the ONNX model, which keeps nothing."""

import base64
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from pt2e_quant.core.capture import Capture
from pt2e_quant.core.errors import InvariantError
from pt2e_quant.core.input_info import InputInfo, InputKind
from pt2e_quant.core.read_capture import CAPTURE_KEY, capture_of
from pt2e_quant.graph.alias import written_inputs
from pt2e_quant.graph.meta import attribute

_ARGUMENT = "state"
"""The keyword argument that the buffers become, with underscores behind it if it is taken."""


@dataclass(frozen=True, slots=True, eq=False)
class StateTensor:
    """A buffer that calls write.

    Args:
        name: in the float model.
        initial: what it holds before the first call.
    """

    name: str
    initial: Tensor

    @property
    def input_name(self) -> str:
        """The name in the ONNX model of the value before a call."""
        return self.name.replace(".", "_")

    @property
    def output_name(self) -> str:
        """The name in the ONNX model of the value after a call."""
        return f"{self.input_name}_next"

    def to_json(self) -> dict[str, Any]:
        """JSON's own types; zeros, which caches hold, are left out."""
        held = self.initial.detach().cpu().contiguous()
        raw = held.reshape(-1).view(torch.uint8).numpy().tobytes() if held.numel() else b""
        packed = base64.b64encode(zlib.compress(raw)).decode() if any(raw) else ""
        return {
            "name": self.name,
            "input": self.input_name,
            "output": self.output_name,
            "shape": list(held.shape),
            "dtype": str(held.dtype).removeprefix("torch."),
            "initial": packed,
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> "StateTensor":
        """Read what `to_json` wrote.

        Raises:
            ValueError: it is damaged.
        """
        empty = torch.zeros(data["shape"], dtype=getattr(torch, data["dtype"]))
        if not data["initial"]:
            return StateTensor(data["name"], empty)
        try:
            raw = zlib.decompress(base64.b64decode(data["initial"]))
        except zlib.error as error:
            raise ValueError(f"the initial value of {data['name']} is damaged: {error}") from error
        held = torch.frombuffer(bytearray(raw), dtype=empty.dtype).reshape(empty.shape)
        return StateTensor(data["name"], held)


def carry_state(gm: GraphModule) -> tuple[StateTensor, ...]:
    """Turn the buffers that a graph writes into its last inputs and outputs; which those are.

    The graph is edited, and its capture with it; it must return a flat tuple.

    Before:  cache = get_attr; index_copy_(cache, …); return (y,)
    After:   cache = clone(state_0); index_copy_(cache, …); return (y, cache)

    Raises:
        InvariantError: the graph does not read a buffer that its capture says calls write.
    """
    capture = capture_of(gm)
    if not capture.mutated_buffers:
        return ()
    found = tuple(_read(gm, name) for name in capture.mutated_buffers)
    # Constants may stand before the inputs, what reads a buffer does not.
    given = [n for n in gm.graph.nodes if n.op == "placeholder"]
    body = given[-1].next if given else next(iter(gm.graph.nodes))
    with gm.graph.inserting_before(body):
        inputs = [gm.graph.placeholder(f"{_ARGUMENT}_{index}") for index in range(len(found))]
        clones = [_take_in(gm, *each) for each in zip(inputs, found, strict=True)]
    output = gm.graph.output_node()
    results = output.args[0]
    assert isinstance(results, tuple)
    output.args = ((*results, *clones),)
    _extend_call(gm, capture, found, len(results))
    gm.graph.lint()
    gm.recompile()
    return found


def _read(gm: GraphModule, name: str) -> StateTensor:
    value = attribute(gm, name)
    if not isinstance(value, Tensor) or not any(_readers(gm, value)):
        raise InvariantError(
            f"calls write buffer {name}, but this graph does not read it",
            fix="give the result of convert_pt2e, before any other edit",
        )
    return StateTensor(name, value.detach().clone())


def _readers(gm: GraphModule, value: Tensor) -> Iterator[Node]:
    """The nodes that read a buffer, under any of its names."""
    for node in gm.graph.nodes:
        held = attribute(gm, str(node.target)) if node.op == "get_attr" else None
        if isinstance(held, Tensor) and held.data_ptr() == value.data_ptr():
            if held.shape == value.shape:
                yield node


def _take_in(gm: GraphModule, placed: Node, tensor: StateTensor) -> Node:
    """A copy of an input in place of a buffer: the graph writes into it."""
    buffer = attribute(gm, tensor.name)
    assert isinstance(buffer, Tensor)
    readers = list(_readers(gm, buffer))
    placed.meta["val"] = readers[0].meta.get("val")
    held = gm.graph.call_function(torch.ops.aten.clone.default, (placed,))
    held.meta = dict(readers[0].meta)
    for reader in readers:
        reader.replace_all_uses_with(held)
        gm.graph.erase_node(reader)
    return held


def _extend_call(
    gm: GraphModule, capture: Capture, found: Sequence[StateTensor], results: int
) -> None:
    """The call's and the result's structure with the state at their ends."""
    argument = _ARGUMENT
    while argument in capture.arg_names:
        argument += "_"
    leaves = list(range(capture.in_spec.num_leaves))
    args, kwargs = pytree.tree_unflatten(leaves, capture.in_spec)
    in_spec = pytree.tree_structure((args, {**kwargs, argument: [0] * len(found)}))
    out_spec = pytree.tree_structure(tuple(range(results + len(found))))
    inputs = tuple(
        InputInfo(
            name=f"{_ARGUMENT}_{index}",
            path=f"{argument}[{index}]",
            kind=InputKind.TENSOR,
            shape=tuple(tensor.initial.shape),
            dtype=str(tensor.initial.dtype).removeprefix("torch."),
            device=str(tensor.initial.device),
        )
        for index, tensor in enumerate(found)
    )
    gm.meta[CAPTURE_KEY] = replace(
        capture,
        arg_names=(*capture.arg_names, argument),
        in_spec=in_spec,
        out_spec=out_spec,
        inputs=(*capture.inputs, *inputs),
        mutated_buffers=(),
    )
    codegen: Any = gm.graph._codegen
    if getattr(codegen, "pytree_info", None) is not None:
        names = [*codegen.pytree_info.orig_args, argument]
        codegen.pytree_info = codegen.pytree_info._replace(
            orig_args=names, in_spec=in_spec, out_spec=out_spec
        )


def return_written(gm: GraphModule) -> tuple[int, ...]:
    """Return behind the results what a graph leaves in inputs that it writes; which those are.

    The graph is edited, and its capture with it; it must return a flat tuple.

    Before:  add_(x, 1); return (y,)
    After:   h = clone(x); add_(h, 1); return (y, h)
    """
    given = [node for node in gm.graph.nodes if node.op == "placeholder"]
    written = written_inputs(gm.graph)
    if not written:
        return ()
    held = []
    for index in written:
        # Not behind all inputs: casts of this one may stand in front of the next.
        with gm.graph.inserting_after(given[index]):
            clone = gm.graph.call_function(torch.ops.aten.clone.default, (given[index],))
            clone.meta = dict(given[index].meta)
            given[index].replace_all_uses_with(clone, lambda user, made=clone: user is not made)
            held.append(clone)
    output = gm.graph.output_node()
    results = output.args[0]
    assert isinstance(results, tuple)
    output.args = ((*results, *held),)
    out_spec = pytree.tree_structure(tuple(range(len(results) + len(held))))
    gm.meta[CAPTURE_KEY] = replace(capture_of(gm), out_spec=out_spec)
    codegen: Any = gm.graph._codegen
    if getattr(codegen, "pytree_info", None) is not None:
        codegen.pytree_info = codegen.pytree_info._replace(out_spec=out_spec)
    gm.graph.lint()
    gm.recompile()
    return written
