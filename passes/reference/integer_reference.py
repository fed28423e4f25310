"""Write a q/dq graph in exact integer arithmetic: what every lowering is held against."""

from torch.fx import GraphModule

from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.pipeline import Note, PassResult, graph_pass
from pt2e_quant.passes.reference.forms.site import Declined
from pt2e_quant.passes.reference.read_sites import FoundSite, Reader, find_sites

__all__ = ["integer_reference"]


@graph_pass()
def integer_reference(gm: GraphModule) -> PassResult:
    """Compute in integers what stands between dequantizes and a quantize.

    Before:  quantize(relu(conv2d(dequantize(x), dequantize(w), b)))
    After:   total = out_dtype(convolution, int32, x.to(int16) - x_zero, w.to(int16)) + b_q
             clamp(round(total.to(float32) * factor), 0, …).to(int32) + zero).to(int8)

    The definitions are the forms of `passes.reference.forms`. Where one declines, the q/dq stay.
    """
    sites = find_sites(gm)
    if not sites:
        return PassResult(changed=False)
    editor = Editor(gm)
    reader = Reader(editor)
    notes = tuple(_write(reader, site) for site in sites)
    return PassResult(changed=editor.finish(), notes=notes)


def _write(reader: Reader, found: FoundSite) -> Note:
    editor, anchor = reader.editor, found.anchor
    mark = editor.mark()
    editor.cursor = anchor
    try:
        made = found.form.write(reader.site(found))
    except Declined as declined:
        editor.roll_back(mark)
        return Note(anchor.name, declined.what, skipped=True)
    finally:
        editor.cursor = None
    editor.replace(anchor, made)
    editor.discard(found.covered)
    return Note(anchor.name, found.form.name)
