"""Definition of an idiom as one operator with a decomposition into ATen."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import GraphModule

from pt2e_quant.graph.pipeline import GraphPass, PassResult
from pt2e_quant.graph.rewrite import Rule, rewrite
from pt2e_quant.graph.subgraphs import named_graphs

_LIBRARY = torch.library.Library("pt2e_quant", "FRAGMENT")  # type: ignore[no-untyped-call]  # torch's own


def define_composite(schema: str, decomposition: Callable[..., Tensor]) -> OpOverload:
    """Define `pt2e_quant::<schema>`: it runs its decomposition, and so does its fake kernel.

    Tracing keeps the operator; `ExportedProgram.run_decompositions` with the decomposition in its
    table replaces it.
    """
    name = schema[: schema.index("(")]
    _LIBRARY.define(schema)  # type: ignore[no-untyped-call]  # torch's own
    torch.library.impl(_LIBRARY, name, "CompositeExplicitAutograd")(decomposition)
    torch.library.register_fake(f"pt2e_quant::{name}", lib=_LIBRARY)(decomposition)
    found: Any = getattr(torch.ops.pt2e_quant, name).default
    assert isinstance(found, OpOverload)
    return found


def compose_idioms(*rules: Rule) -> GraphPass:
    """The pass that puts composite operators in the place of what the rules find.

    Before:  y = x * rsqrt(mean(x ** 2, -1) + eps)
    After:   y = pt2e_quant.rms_norm(x, [-1], eps)

    Bodies of control flow are edited like the graph around them. The notes say which idioms were
    found, and why one that a pattern matched was declined.
    """

    def edit(gm: GraphModule) -> PassResult:
        changed, notes = False, []
        for graph in named_graphs(gm):
            result = rewrite(graph.gm, rules)
            changed |= result.changed
            notes += [replace(note, node=graph.prefix + note.node) for note in result.notes]
        return PassResult(changed=changed, notes=tuple(notes))

    return GraphPass("compose_idioms", edit, needs=(), gives=())
