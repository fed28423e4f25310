"""The registry's patterns between dequantize and quantize become calls of fused kernels."""

from torch.fx import GraphModule, Node

from pt2e_quant.backends.cuda.choice import Measures, decide
from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.pattern import Match, find_matches
from pt2e_quant.graph.pipeline import GraphPass, Note, PassResult
from pt2e_quant.kernels.kernel import Kernel
from pt2e_quant.kernels.quantized_values import requantized
from pt2e_quant.kernels.registry import Registry
from pt2e_quant.kernels.site import Site
from pt2e_quant.passes.duplicate_dequantize import one_reader

__all__ = ["KERNEL_KEY", "REFUSED_KEY", "fuse_kernels"]

KERNEL_KEY = "pt2e_quant.kernel"
"""Key of `node.meta` with the `Kernel` that a fused call was built by."""

REFUSED_KEY = "pt2e_quant.cuda.refused"
"""Key of `gm.meta`: node name to why no kernel was used there though its q/dq fit one."""


def fuse_kernels(registry: Registry, measures: Measures) -> GraphPass:
    """A pass that replaces dq → operators → q by one call of a registry's kernel.

    Before:  q(relu(linear(dq(x), dq(w), b)))
    After:   pt2e_quant.int8_linear(x, …, w, …, bias=b, activation="relu", out_dtype=int8, …)

    A result that something reads in float stays float.
    """

    def edit(gm: GraphModule) -> PassResult:
        refused: dict[str, str] = {}
        patterns = [(kernel, op) for kernel in registry for op in kernel.row.find]
        matches = find_matches(gm.graph, patterns, decide(gm, measures, refused))
        editor = Editor(gm)
        for kernel, match in matches:
            _replace(editor, kernel, match)
            refused.pop(match.anchor.name, None)
        gm.meta[REFUSED_KEY] = refused
        notes = tuple(Note(match.anchor.name, kernel.op) for kernel, match in matches)
        return PassResult(changed=editor.finish(), notes=notes)

    return GraphPass("fuse_kernels", edit, needs=(one_reader,))


def _replace(editor: Editor, kernel: Kernel, match: Match) -> None:
    anchor = match.anchor
    written = requantized(anchor)
    affine, readers = (None, []) if written is None else written
    made = kernel.build(
        Site(
            editor=editor,
            match=match,
            place=anchor,
            output=affine,
            readers=tuple(readers),
        )
    )
    made.meta[KERNEL_KEY] = kernel
    read = _operands(match)
    for reader in readers or [anchor]:
        editor.replace(reader, made)
    editor.discard([*match.covered, *read])


def _operands(match: Match) -> list[Node]:
    """The nodes that the pattern's variables stand for: dequantizes nothing may read any more."""
    found: list[Node] = []
    for value in match.values.values():
        nodes = value if isinstance(value, tuple) else (value,)
        found.extend(node for node in nodes if isinstance(node, Node))
    return found
