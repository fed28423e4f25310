"""Write a q/dq graph in exact integer arithmetic, the reference for every lowering."""

from collections.abc import Set

from torch.fx import GraphModule

from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.pipeline import GraphPass, Note, PassResult
from pt2e_quant.passes.reference.forms.site import (
    DEFAULT_ARITHMETIC,
    Arithmetic,
    Declined,
    Overflow,
)
from pt2e_quant.passes.reference.read_sites import FoundSite, Reader, find_sites


def write_integers(
    arithmetic: Arithmetic = DEFAULT_ARITHMETIC, floats: Set[str] = frozenset()
) -> GraphPass:
    """The pass that computes in integers what stands between dequantizes and a quantize.

    Before:  quantize(relu(conv2d(dequantize(x), dequantize(w), b)))
    After:   total = out_dtype(convolution, int32, x.to(int16) - x_zero, w.to(int16)) + b_q
             (clamp(round(total.to(float32) * factor), 0, …) + zero).to(int8)

    The definitions are the forms of `passes.reference.forms`. Where one declines, the q/dq stay.

    Args:
        arithmetic: how the target rounds.
        floats: names of operators that stay float.
    """

    def edit(gm: GraphModule) -> PassResult:
        sites = [site for site in find_sites(gm) if floats.isdisjoint(site.names)]
        if not sites:
            return PassResult(changed=False)
        editor = Editor(gm)
        reader = Reader(editor, arithmetic)
        notes = tuple(_write(reader, site) for site in sites)
        return PassResult(changed=editor.finish(), notes=notes)

    return GraphPass("integer_reference", edit, needs=(), gives=())


def _write(reader: Reader, found: FoundSite) -> Note:
    editor, anchor = reader.editor, found.anchor
    mark = editor.mark()
    editor.cursor = anchor
    site = reader.site(found)
    try:
        made = found.form.write(site)
    except Overflow as overflow:
        fix = "accumulator_bits=64, or a scheme of fewer bits for this node"
        raise Overflow(overflow.what, node=found.op, fix=fix) from overflow
    except Declined as declined:
        editor.roll_back(mark)
        return Note(anchor.name, declined.what, skipped=True)
    finally:
        editor.cursor = None
    editor.replace(anchor, made)
    editor.discard(found.covered)
    return Note(anchor.name, "; ".join((found.form.name, *site.remarks)))
