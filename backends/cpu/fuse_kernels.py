"""The registry's patterns between dequantize and quantize become calls of fused kernels."""

import torch
from torch.fx import GraphModule, Node

from pt2e_quant.core.schemes import Role
from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.op_table import OpRow
from pt2e_quant.graph.pattern import Match, find_matches
from pt2e_quant.graph.pipeline import GraphPass, Note, PassResult
from pt2e_quant.kernels.kernel import Kernel
from pt2e_quant.kernels.quantized_values import affine_of, read_weight, requantized
from pt2e_quant.kernels.registry import Registry
from pt2e_quant.kernels.site import Site
from pt2e_quant.passes.duplicate_dequantize import one_reader

__all__ = ["KERNEL_KEY", "REFUSED_KEY", "fuse_kernels"]

KERNEL_KEY = "pt2e_quant.kernel"
"""Key of `node.meta` with the `Kernel` that a fused call was built by."""

_CLAMP = torch.ops.aten.clamp_max.default
REFUSED_KEY = "pt2e_quant.cpu.refused"
"""Key of `gm.meta`: node name to why no kernel was used there though its q/dq fit one."""


def fuse_kernels(registry: Registry) -> GraphPass:
    """A pass that replaces dq → operators → q by one call of a registry's kernel.

    Before:  q(relu(conv2d(dq(x), dq(w), b)))
    After:   qconv_pointwise(x, …, pack_onednn_conv(w, …), …, b, …, uint8, "relu")

    A result that something reads in float stays float.
    """

    def edit(gm: GraphModule) -> PassResult:
        refused: dict[str, str] = {}
        patterns = [(kernel, op) for kernel in registry for op in kernel.row.find]
        matches = find_matches(gm.graph, patterns, lambda k, m: _fits(gm, k, m, refused))
        editor = Editor(gm)
        for kernel, match in matches:
            _replace(editor, kernel, match)
            refused.pop(match.anchor.name, None)
        gm.meta[REFUSED_KEY] = refused
        notes = tuple(Note(match.anchor.name, kernel.op) for kernel, match in matches)
        return PassResult(changed=editor.finish(), notes=notes)

    return GraphPass("fuse_kernels", edit, needs=(one_reader,))


def _fits(gm: GraphModule, kernel: Kernel, match: Match, refused: dict[str, str]) -> bool:
    """Whether the q/dq around a match are the row's; why one that fits is left goes to `refused`.

    Ranges narrower than the row's, or of weights that use -128, are taken: what a foreign
    quantizer wrote runs too.
    """
    if not all(_slot_fits(gm, kernel.row, match, slot.at, slot.role) for slot in kernel.row.slots):
        return False
    broken = kernel.row.refusal(match)
    if broken is not None:
        refused.setdefault(match.anchor.name, f"{kernel.op} needs {broken.text}")
    return broken is None


def _slot_fits(gm: GraphModule, row: OpRow, match: Match, at: str, role: Role) -> bool:
    if role is Role.WEIGHT:
        return read_weight(gm, match[at]) is not None
    if role is Role.OUTPUT:
        written = requantized(match.anchor)
        return written is not None and written[0].dtype is torch.uint8
    if at == "y":  # a summand may be float
        return isinstance(match[at], Node)
    value = match[at]
    sources = value if isinstance(value, tuple) else (value,)
    affines = [affine_of(source) for source in sources]
    return all(affine is not None and affine.dtype is torch.uint8 for affine in affines)


def _replace(editor: Editor, kernel: Kernel, match: Match) -> None:
    anchor = match.anchor
    affine, readers = requantized(anchor) or (None, [])
    if affine is not None and affine.dtype is not torch.uint8:
        affine, readers = None, []
    site = Site(editor=editor, match=match, place=anchor, output=affine, readers=tuple(readers))
    made = kernel.build(site)
    _fused(made).meta[KERNEL_KEY] = kernel
    gives_integers = affine is not None and not made.meta["val"].is_floating_point()
    for reader in readers if gives_integers else [anchor]:
        editor.replace(reader, made)
    editor.discard([*match.covered, *_operands(match)])


def _fused(made: Node) -> Node:
    """The fused call itself, behind the clamp of a 7-bit result."""
    source = made.args[0]
    return source if made.target is _CLAMP and isinstance(source, Node) else made


def _operands(match: Match) -> list[Node]:
    """The nodes that the pattern's variables stand for: dequantizes nothing may read any more."""
    found: list[Node] = []
    for value in match.values.values():
        nodes = value if isinstance(value, tuple) else (value,)
        found.extend(node for node in nodes if isinstance(node, Node))
    return found
