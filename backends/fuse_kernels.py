"""Replace patterns between dequantize and quantize by calls of fused kernels."""

from collections.abc import Callable

import torch
from torch.fx import GraphModule, Node

from pt2e_quant.graph.alias import state_writers
from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.pattern import Match, find_matches
from pt2e_quant.graph.pipeline import HAS_VALUES, GraphPass, Note, PassResult
from pt2e_quant.kernels.kernel import Kernel
from pt2e_quant.kernels.quantized_values import requantized, rewritten
from pt2e_quant.kernels.registry import Registry
from pt2e_quant.kernels.site import Site
from pt2e_quant.passes.qdq.duplicate_dequantize import one_reader

ANCHOR_KEY = "pt2e_quant.anchor"
"""Key of a fused call's `node.meta`: the name of the last operator that it took the place of."""

KERNEL_KEY = "pt2e_quant.kernel"
"""Key of `node.meta` with the `Kernel` that a fused call was built by."""

REFUSED_KEY = "pt2e_quant.refused"
"""Key of `gm.meta`: node name to why no kernel was used there though its q/dq fit one."""

Decide = Callable[[GraphModule, dict[str, str]], Callable[[Kernel, Match], bool]]
"""From a graph to a predicate whether a kernel takes a match; reasons for others go to the dict."""

_ENDINGS = tuple(
    getattr(torch.ops.aten, name).default for name in ("clamp_max", "clamp_min", "relu")
)
"""What may stand behind a fused call whose operator cannot do it itself."""


def fuse_kernels(registry: Registry, decide: Decide, *, output: torch.dtype) -> GraphPass:
    """A pass that replaces dq → operators → q by one call of a registry's kernel.

    Before:  q(relu(linear(dq(x), dq(w), b)))
    After:   pt2e_quant.int8_linear(x, …, w, …, bias=b, activation="relu", out_dtype=int8, …)

    A result that something reads in float stays float. An operator that writes a buffer or an
    input is never taken: kernels give new tensors.

    Args:
        registry: the kernels.
        decide: which matches they take.
        output: the integers that kernels write; a result quantized to others stays float, but for
            float8_e4m3fn where a kernel writes that too.
    """

    def edit(gm: GraphModule) -> PassResult:
        refused: dict[str, str] = {}
        patterns = [(kernel, op) for kernel in registry for op in kernel.row.find]
        takes, writers = decide(gm, refused), state_writers(gm.graph)

        def takes_whole(kernel: Kernel, match: Match) -> bool:
            return writers.isdisjoint(match.covered) and takes(kernel, match)

        matches = find_matches(gm.graph, patterns, takes_whole)
        editor = Editor(gm)
        for kernel, match in matches:
            _replace(editor, kernel, match, output)
            refused.pop(match.anchor.name, None)
        gm.meta[REFUSED_KEY] = refused
        notes = tuple(Note(match.anchor.name, kernel.op) for kernel, match in matches)
        return PassResult(changed=editor.finish(), notes=notes)

    return GraphPass("fuse_kernels", edit, needs=(HAS_VALUES, one_reader), gives=())


def _replace(editor: Editor, kernel: Kernel, match: Match, output: torch.dtype) -> None:
    anchor = match.anchor
    affine, readers = (rewritten if kernel.writes_e4m3 else requantized)(anchor) or (None, [])
    if affine is not None and affine.dtype not in (output, torch.float8_e4m3fn):
        affine, readers = None, []
    site = Site(editor=editor, match=match, place=anchor, output=affine, readers=tuple(readers))
    made = kernel.build(site)
    _fused(made).meta[KERNEL_KEY] = kernel
    _fused(made).meta[ANCHOR_KEY] = anchor.name
    gives_codes = affine is not None and made.meta["val"].dtype is affine.dtype
    for reader in readers if gives_codes else [anchor]:
        editor.replace(reader, made)
    editor.discard([*match.covered, *_operands(match)])


def _fused(made: Node) -> Node:
    """The fused call itself, behind what ends it."""
    while made.target in _ENDINGS and isinstance(source := made.args[0], Node):
        made = source
    return made


def _operands(match: Match) -> list[Node]:
    """The nodes that the pattern's variables stand for: dequantizes nothing may read any more."""
    found: list[Node] = []
    for value in match.values.values():
        nodes = value if isinstance(value, tuple) else (value,)
        found.extend(node for node in nodes if isinstance(node, Node))
    return found
