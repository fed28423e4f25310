"""Export a converted graph again with the captured inputs and dynamic shapes."""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch._dynamo.exc import UserError
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from pt2e_quant.accelerate.recompile import recompile
from pt2e_quant.core.capture import Capture
from pt2e_quant.core.errors import UnsupportedError
from pt2e_quant.core.qdq import is_qdq
from pt2e_quant.core.read_capture import capture_of
from pt2e_quant.core.tree_specs import plain_spec
from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.ops import aten
from pt2e_quant.graph.subgraphs import copy_graph

_SIZES = frozenset((aten.sym_size.int, aten.sym_size.default))


def export_again(gm: GraphModule, *, is_stored: bool = False) -> ExportedProgram:
    """An ExportedProgram of a graph module whose dynamic dimensions are the captured ones.

    A plain re-export of a graph module specialises to the sample's shape; this one does not.

    Args:
        gm: the graph module.
        is_stored: the program goes into a file: classes of its call and result that torch does
            not have itself are dicts of their named fields, else (namedtuples too) tuples.

    Raises:
        UnsupportedError: torch takes the graph for the example's sizes only.
    """
    capture = capture_of(gm)
    if is_stored:
        gm, capture = _plainly_called(gm, capture)
    first: UserError | None = None
    # A size of the sample may come to 1 in the middle of the graph, where torch holds it to be 1.
    # Where each sample has a size on one side of such a step, torch may leave out the other side.
    for is_larger, is_loose in ((False, False), (True, False), (True, True)):
        export = partial(
            torch.export.export,
            gm,
            *capture.example_inputs(larger=is_larger),
            strict=False,
            dynamic_shapes=capture.dynamic_shapes(is_loose=is_loose),
        )
        with torch.no_grad():
            try:
                return export()
            except (UserError, AssertionError):  # torch may fail to write the violation's text.
                pass
            try:
                # A size that is a multiple: known of the capture.
                program = export(prefer_deferred_runtime_asserts_over_guards=True)
                break
            except UserError as error:
                first = first or error
    else:
        assert first is not None
        raise _fixed_size(gm, first) from first
    graph = program.graph_module.graph
    editor = Editor(program.graph_module)
    editor.erase_dead([n for n in graph.nodes if n.target is aten._assert_scalar.default])
    editor.finish()
    return program


def _plainly_called(gm: GraphModule, capture: Capture) -> tuple[GraphModule, Capture]:
    """A graph module and its capture with plain structures: themselves where they have those."""
    given, result = plain_spec(capture.in_spec), plain_spec(capture.out_spec)
    if (given, result) == (capture.in_spec, capture.out_spec):
        return gm, capture
    gm = copy_graph(gm)
    codegen: Any = gm.graph._codegen
    if getattr(codegen, "pytree_info", None) is not None:
        codegen.pytree_info = codegen.pytree_info._replace(in_spec=given, out_spec=result)
    recompile(gm)
    return gm, replace(capture, in_spec=given, out_spec=result)


def _fixed_size(gm: GraphModule, error: UserError) -> UnsupportedError:
    """Torch holds a size to be fixed: the error, with the operator that reads it first."""
    dynamic = [
        (info, dim)
        for info in capture_of(gm).inputs
        for dim, size in enumerate(info.shape)
        if not isinstance(size, int)
    ]
    # torch names an input by the local variable that holds it: L['x'].size()[0].
    named = [(i, d) for i, d in dynamic if f"{i.path}'].size()[{d}]" in str(error)] or dynamic
    info, dim = named[0]
    return UnsupportedError(
        f'torch.export holds dimension {dim} of input "{info.path}" to be as large as in the '
        "example, though the program was captured for other sizes: a size of 1 in the middle of "
        "the graph, which broadcasts, depends on it",
        node=first_reader(gm, info.name),
        fix=f"export it with a fixed size, dynamic_shapes={{'{info.path}': {{{dim}: None}}}}, "
        "or with an example whose sizes are all above 1 throughout the graph",
    )


def first_reader(gm: GraphModule, name: str) -> Node | None:
    """The first operator that reads an input: an error's module and line are its own."""
    node: Node | None = next((n for n in gm.graph.nodes if n.target == name), None)
    while node is not None and (node.op == "placeholder" or is_qdq(node)):
        readers = (u for u in node.users if u.op != "output" and u.target not in _SIZES)
        reader = next(readers, None)
        if reader is None:
            return node
        node = reader
    return node
