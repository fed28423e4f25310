import torch
from torch import nn

from pt2e_quant.graph.show import show, show_type
from pt2e_quant.passes.cleanup.strip_guards import strip_guards


def test_show_when_names_or_argument_forms_differ_then_the_same_text():
    class Positional(nn.Module):
        def forward(self, x):
            return torch.ops.aten.softmax.int(x, 1, None).sum(dim=1)

    class Keyword(nn.Module):
        def forward(self, x):
            return torch.ops.aten.softmax.int(x, dim=1).sum(1, keepdim=False)

    texts = []
    for model in (Positional(), Keyword()):
        rows = torch.export.Dim(f"rows_of_{type(model).__name__}", min=2, max=9)
        gm = torch.export.export(model, (torch.ones(3, 4),), dynamic_shapes=({0: rows},)).module()
        strip_guards(gm)
        node = next(n for n in gm.graph.nodes if n.op == "call_function")
        node._rename("something_else")
        texts.append(show(gm))
    assert texts[0] == texts[1]
    assert texts[0] == (
        "x: f32[s0, 4] = input\n"
        "softmax: f32[s0, 4] = softmax(x, 1)\n"
        "sum: f32[s0] = sum(softmax, [1])\n"
        "return (sum)\n"
    )


def test_show_when_there_are_bodies_then_shown_below():
    class Branch(nn.Module):
        def forward(self, x):
            return torch.cond(x.sum() > 0, lambda v: v + 1, lambda v: v - 1, (x,))

    gm = torch.export.export(Branch(), (torch.ones(2),)).module()
    strip_guards(gm)
    assert show(gm) == (
        "x: f32[2] = input\n"
        "sum: f32[] = sum(x)\n"
        "gt: bool[] = gt(sum, 0)\n"
        "cond: (f32[2]) = cond(gt, true_graph_0, false_graph_0, (x))\n"
        "getitem: f32[2] = getitem(cond, 0)\n"
        "return (getitem)\n"
        "true_graph_0:\n"
        "    x: f32[2] = input\n"
        "    add: f32[2] = add(x, 1)\n"
        "    return (add)\n"
        "false_graph_0:\n"
        "    x: f32[2] = input\n"
        "    sub: f32[2] = sub(x, 1)\n"
        "    return (sub)\n"
    )


def test_show_type_when_tensors_or_tuples_then_short():
    assert show_type(torch.ones(2, 3, dtype=torch.int8)) == "i8[2, 3]"
    assert show_type((torch.ones(1), torch.ones(1, dtype=torch.bool))) == "(f32[1], bool[1])"
    assert show_type(None) == ""


def test_show_when_a_dtype_is_unsigned_then_no_symbol():
    class Bytes(torch.nn.Module):
        def forward(self, x):
            return x.to(torch.uint8)

    batch = torch.export.Dim("batch", min=2, max=8)
    gm = torch.export.export(Bytes(), (torch.ones(4, 3),), dynamic_shapes=({0: batch},)).module(
        check_guards=False
    )
    assert "u8[s0, 3] = " in show(gm)
