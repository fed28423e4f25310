"""Names of torchao.quantization.pt2e.lowering: the freezing passes of torch's Inductor.

They lower a converted graph to oneDNN's fused operators.

For scripts that lower ahead of torch.compile; the passes are torch's own.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._inductor.constant_folding import constant_fold
from torch._inductor.fx_passes.freezing_patterns import freezing_passes
from torch.fx import GraphModule, Node

from pt2e_quant.core.provenance import PROVENANCE_KEY
from pt2e_quant.core.read_capture import CAPTURE_KEY, capture_of
from pt2e_quant.flow.prepare.input_check import install_input_check
from pt2e_quant.graph.alias import mutated_buffers
from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.meta import attribute
from pt2e_quant.graph.ops import aten
from pt2e_quant.graph.pipeline import run_passes
from pt2e_quant.passes.cleanup.drop_dead_constants import drop_dead_constants
from pt2e_quant.passes.cleanup.strip_guards import strip_guards

__all__ = ["lower_pt2e_quantized_to_x86"]


def lower_pt2e_quantized_to_x86(
    model: GraphModule, example_inputs: tuple[Tensor, ...]
) -> GraphModule:
    """Fuse q/dq and operators into oneDNN's integer operators, weights prepacked.

    Dynamic dimensions stay dynamic, and buffers that the model writes stay buffers.

    Args:
        model: of `convert_pt2e`; it is not changed.
        example_inputs: one call's positional inputs.

    Raises:
        InputError: the inputs do not fit the captured call.
    """
    capture = capture_of(model)
    leaves = capture.bind(example_inputs)
    args = tuple(capture.positional(leaves))
    shapes = capture.dynamic_shapes()
    with torch.no_grad():
        exported = torch.export.export(
            model,
            args,
            dynamic_shapes=shapes and tuple(shapes[name] for name in capture.arg_names),
            strict=False,
        )
        gm: Any = exported.run_decompositions(_composite_ops()).module()
    run_passes(gm, (strip_guards,))
    _write_transposes(gm)
    with torch.no_grad(), _buffers_as_inputs(gm):
        values = [n.meta["val"] for n in gm.graph.nodes if n.op == "placeholder"]
        freezing_passes(gm, values)
        constant_fold(gm)
    run_passes(gm, (drop_dead_constants,))
    gm.meta[CAPTURE_KEY] = capture
    if PROVENANCE_KEY in model.meta:
        gm.meta[PROVENANCE_KEY] = model.meta[PROVENANCE_KEY]
    install_input_check(gm)
    return gm  # type: ignore[no-any-return]


def _composite_ops() -> dict[Any, Any]:
    """The decompositions of operators that are compositions of others, and no more."""
    table: Any = torch.export.default_decompositions()
    composite = torch._C.DispatchKey.CompositeImplicitAutograd
    return {
        operator: rule
        for operator, rule in table.items()
        if torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), composite)
        or composite in operator.py_kernels
    }


def _write_transposes(gm: GraphModule) -> None:
    """Write t(x) as permute(x, [1, 0]), which is the form that the fusion patterns know."""
    editor = Editor(gm)
    for node in list(gm.graph.nodes):
        if node.target == aten.t.default:
            made = editor.call(
                aten.permute.default, node.args[0], [1, 0], like=node, val=node.meta["val"]
            )
            editor.replace(node, made)
    editor.finish()


@contextmanager
def _buffers_as_inputs(gm: GraphModule) -> Iterator[None]:
    """Show buffers that the graph writes as inputs meanwhile, so that none is folded."""
    hidden: dict[str, Node] = {}
    first = next(iter(gm.graph.nodes))
    for name in mutated_buffers(gm):
        for node in [n for n in gm.graph.nodes if n.op == "get_attr" and n.target == name]:
            if name not in hidden:
                with gm.graph.inserting_before(first):
                    hidden[name] = gm.graph.placeholder(f"buffer_{name.replace('.', '_')}")
                hidden[name].meta = dict(node.meta)
            node.replace_all_uses_with(hidden[name])
            gm.graph.erase_node(node)
    kept = {name: attribute(gm, name) for name in hidden}
    yield
    for name, node in hidden.items():
        if attribute(gm, name) is None:
            owner, _, leaf = name.rpartition(".")
            gm.get_submodule(owner).register_buffer(leaf, kept[name])
        with gm.graph.inserting_after(node):
            read = gm.graph.get_attr(name)
        read.meta = node.meta
        node.replace_all_uses_with(read)
        gm.graph.erase_node(node)
