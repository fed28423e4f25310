import pytest
import torch
from torch import nn

from pt2e_quant.core.errors import InvariantError
from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.ops import MUL, RELU, aten
from pt2e_quant.graph.pattern import Op, Var
from pt2e_quant.graph.rewrite import Rule, Skip, rewrite
from pt2e_quant.graph.show import show

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


def export(forward, dynamic_shapes=None, **modules):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            for name, module in modules.items():
                setattr(self, name, module)

        def forward(self, x):
            return forward(self, x)

    program = torch.export.export(Model().eval(), (X,), dynamic_shapes=dynamic_shapes)
    gm = program.module()
    Editor(gm).erase_dead([n for n in gm.graph.nodes if n.op == "call_module"])
    return gm


def double(m, editor):
    return editor.call(aten.mul.Tensor, m["x"], 2.0, like=m.anchor)


DOUBLE = Rule("doubled", Op(RELU, Var("x")), double)


def test_rewrite_when_there_are_many_matches_then_one_recompile(monkeypatch):
    gm = export(lambda m, x: x.relu().relu().relu() + 1)
    calls = []
    compile_ = type(gm).recompile
    monkeypatch.setattr(type(gm), "recompile", lambda self: calls.append(1) or compile_(self))
    result = rewrite(gm, (DOUBLE,))
    assert result.changed
    assert [(n.node, n.text) for n in result.notes] == [
        ("relu", "doubled"),
        ("relu_1", "doubled"),
        ("relu_2", "doubled"),
    ]
    assert show(gm) == (
        "x: f32[3, 4] = input\n"
        "mul: f32[3, 4] = mul(x, 2.0)\n"
        "mul_1: f32[3, 4] = mul(mul, 2.0)\n"
        "mul_2: f32[3, 4] = mul(mul_1, 2.0)\n"
        "add: f32[3, 4] = add(mul_2, 1)\n"
        "return (add)\n"
    )
    assert calls == [1]
    assert torch.equal(gm(X), X * 8 + 1)


def test_rewrite_when_a_rule_skips_then_the_graph_stays_and_says_why():
    def declined(m, editor):
        editor.call(aten.neg.default, m["x"], like=m.anchor)
        return Skip("not today")

    gm = export(lambda m, x: x.relu())
    before = show(gm)
    result = rewrite(gm, (Rule("r", Op(RELU, Var("x")), declined),))
    assert not [n for n in gm.graph.nodes if "neg" in n.name], "what it began is taken back"
    assert show(gm) == before
    assert [(n.node, n.text, n.skipped) for n in result.notes] == [("relu", "not today", True)]


def test_rewrite_when_two_rules_apply_then_neither_sees_the_others_result():
    def negate(m, editor):
        return editor.call(aten.neg.default, m["x"], like=m.anchor)

    again = Rule("negated", Op(MUL, Var("x")), negate)
    gm = export(lambda m, x: x.relu() * 3)
    rewrite(gm, (DOUBLE, again))
    assert [n.target for n in gm.graph.nodes if n.op == "call_function"] == [
        aten.mul.Tensor,
        aten.neg.default,
    ]


def test_rewrite_when_nothing_is_found_then_nothing_changes():
    gm = export(lambda m, x: x + 1)
    assert not rewrite(gm, (DOUBLE,)).changed


def test_rewrite_when_a_node_is_made_then_carries_value_and_trace():
    rows = torch.export.Dim("rows", min=2, max=9)
    gm = export(lambda m, x: m.act(x), ({0: rows},), act=nn.ReLU())
    rewrite(gm, (DOUBLE,))
    node = next(n for n in gm.graph.nodes if n.op == "call_function")
    assert node.name == "mul"
    assert str(node.meta["val"].shape[0]) == str(
        next(n for n in gm.graph.nodes if n.op == "placeholder").meta["val"].shape[0]
    )
    assert list(node.meta["nn_module_stack"].values())[-1][0] == "act"
    assert "F.relu(" in node.meta["stack_trace"]


def test_editor_when_constants_are_made_then_their_names_are_unique():
    gm = export(lambda m, x: m.fc(x), fc=nn.Linear(4, 4))
    editor = Editor(gm)
    like = next(n for n in gm.graph.nodes if n.op == "call_function")
    made = [editor.constant("fc.weight", torch.zeros(2), like=like) for _ in range(3)]
    made.append(editor.constant("new.scale", torch.zeros(2)))
    assert [n.target for n in made] == ["fc.weight_1", "fc.weight_2", "fc.weight_3", "new.scale"]
    assert set(gm.state_dict()) == {"fc.weight", "fc.bias", *(str(n.target) for n in made)}
    assert made[0].meta["val"].shape == (2,)


def test_editor_when_many_constants_are_made_then_each_name_takes_one_probe():
    gm = export(lambda m, x: m.fc(x), fc=nn.Linear(4, 4))
    editor = Editor(gm)
    for _ in range(500):
        editor.constant("fc.scale", torch.zeros(1))
    probes = editor._next_suffix["fc.scale"]
    assert probes == 500, "each name is found at the first try"


def test_rebind_when_a_constant_has_one_reader_then_new_tensor_under_old_name():
    gm = export(lambda m, x: m.fc(x), fc=nn.Linear(4, 4))
    reader = next(n for n in gm.graph.nodes if n.op == "call_function")
    weight = next(n for n in gm.graph.nodes if n.target == "fc.weight")
    held = gm.fc.weight
    before = held.detach().clone()
    editor = Editor(gm)
    assert editor.rebind(weight, held.detach() * 2, reader=reader) is weight
    editor.finish()
    assert torch.equal(held, before), "the old tensor is not written"
    assert isinstance(gm.fc.weight, nn.Parameter)
    assert torch.equal(gm.fc.weight, before * 2)


def test_rebind_when_a_constant_is_shared_then_a_new_name():
    gm = export(lambda m, x: m.fc(m.fc(x)), fc=nn.Linear(4, 4))
    reader = next(n for n in gm.graph.nodes if n.op == "call_function")
    weight = next(n for n in gm.graph.nodes if n.target == "fc.weight")
    made = Editor(gm).rebind(weight, torch.zeros(4, 4), reader=reader)
    assert made.target == "fc.weight_1"


def test_editor_when_a_node_is_replaced_then_stands_for_its_replacement():
    gm = export(lambda m, x: (x.relu() + 1).sum())
    editor = Editor(gm)
    relu, add = (n for n in gm.graph.nodes if n.name in ("relu", "add"))
    new = editor.call(aten.neg.default, relu.args[0], like=relu)
    editor.replace(relu, new)
    late = editor.call(aten.abs.default, relu, like=add)
    assert late.args == (new,)
    editor.replace(add, late)
    assert editor.finish()
    assert [n.name for n in gm.graph.nodes if n.op == "call_function"] == ["neg", "abs_1", "sum_1"]


def test_replace_when_readers_are_excepted_then_they_keep_the_old():
    gm = export(lambda m, x: x.relu() + 1)
    editor = Editor(gm)
    relu = next(n for n in gm.graph.nodes if n.name == "relu")
    new = editor.call(aten.neg.default, relu, like=relu, after=relu)
    editor.replace(relu, new, except_in=[new])
    editor.finish()
    assert show(gm).splitlines()[1:4] == [
        "relu: f32[3, 4] = relu(x)",
        "neg: f32[3, 4] = neg(relu)",
        "add: f32[3, 4] = add(neg, 1)",
    ]


def test_editor_when_an_input_has_no_value_then_named():
    gm = export(lambda m, x: x.relu())
    relu = next(n for n in gm.graph.nodes if n.name == "relu")
    del relu.meta["val"]
    with pytest.raises(InvariantError, match='node relu carries no meta\\["val"\\]'):
        Editor(gm).call(aten.neg.default, relu, like=relu, after=relu)
