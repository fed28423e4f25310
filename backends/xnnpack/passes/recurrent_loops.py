"""Loops in a program for ExecuTorch: one partition of the delegate, called once for each step."""

from collections.abc import Mapping
from operator import getitem
from typing import Any

import torch
from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower
from torch import Tensor
from torch.export import Dim, ExportedProgram
from torch.fx import GraphModule, Node

from pt2e_quant.backends.xnnpack.partition import make_partitioner
from pt2e_quant.backends.xnnpack.passes.recurrent import RecurrentSteps, Step
from pt2e_quant.backends.xnnpack.sizes import start_small
from pt2e_quant.backends.xnnpack.table import FUSING, edge_operators
from pt2e_quant.core.errors import UnsupportedError

CONFIG = EdgeCompileConfig(_check_ir_validity=False)


def loop_recurrent(program: ExportedProgram, steps: Mapping[str, Step]) -> None:
    """Put a loop in the place of each call of `RecurrentSteps`.

    Before:  y, [h, c] = recurrent_steps(gates, [h0, c0], name)
    After:   h, c, y = scan(step, [h0, c0], gates, ()), where step calls the delegate

    Args:
        program: a lowered one, edited in place.
        steps: what a step computes, by name.
    """
    if not steps:
        return
    gm = program.graph_module
    found = [n for n in gm.graph.nodes if getattr(n.target, "_op", n.target) is RecurrentSteps]
    for node in found:
        _write_loop(program, node, steps[str(node.args[2])])
    gm.graph.eliminate_dead_code()
    gm.recompile()


def _write_loop(program: ExportedProgram, node: Node, step: Step) -> None:
    gm = program.graph_module
    gates: Any = node.args[0]
    states: Any = node.args[1]
    values = [s.meta["val"] for s in states], [g.meta["val"][0] for g in gates]
    body = _body(program, step, *values)
    name = f"{node.args[2]}_step"
    gm.add_module(name, body)
    y, last = node.meta["val"]
    with gm.graph.inserting_before(node):
        held = gm.graph.get_attr(name)
        scan = torch.ops.higher_order.scan
        loop = gm.graph.call_function(scan, (held, list(states), list(gates), ()))
        loop.meta["val"] = (*last, y)
        items = []
        for index, value in enumerate(loop.meta["val"]):
            item = gm.graph.call_function(getitem, (loop, index))
            item.meta["val"] = value
            items.append(item)
    for user in list(node.users):
        if user.args[1] == 0:
            user.replace_all_uses_with(items[-1])
            continue
        for state in list(user.users):
            state.replace_all_uses_with(items[int(state.args[1])])  # type: ignore[arg-type]  # a literal


def _body(
    program: ExportedProgram, step: Step, states: list[Tensor], gates: list[Tensor]
) -> GraphModule:
    """The graph of a step, lowered by itself, with the sizes of the program around it."""
    batch = states[0].shape[0]
    size = int(batch.node.hint) if isinstance(batch, torch.SymInt) else batch
    example = tuple([torch.zeros(size, v.shape[1]) for v in part] for part in (states, gates))
    shapes = None
    if isinstance(batch, torch.SymInt):
        limits = program.range_constraints[batch.node.expr]
        dim = Dim("batch", min=1, max=int(limits.upper))
        shapes = tuple([{0: dim} for _ in part] for part in (states, gates))
    exported = torch.export.export(step, example, dynamic_shapes=shapes)
    with start_small(exported.range_constraints):
        lowered = to_edge_transform_and_lower(
            exported,
            partitioner=[make_partitioner(edge_operators(), FUSING)],
            compile_config=CONFIG,
        ).exported_program()
    body: GraphModule = lowered.graph_module
    inputs = [n for n in body.graph.nodes if n.op == "placeholder"]
    if len(inputs) != len(states) + len(gates):
        raise UnsupportedError(
            f"the delegate does not take a step of a recurrent layer ({step.cell})",
            fix="write its steps out in the model, with a cell in a loop",
        )
    mode = states[0].fake_mode  # type: ignore[attr-defined]  # a fake value
    for node in body.graph.nodes:
        if "val" in node.meta:
            with mode:
                node.meta["val"] = torch.utils._pytree.tree_map_only(
                    Tensor, lambda v: torch.empty(batch, *v.shape[1:]), node.meta["val"]
                )
    body.meta = dict(program.graph_module.meta)
    return body
