import pytest
import torch
from torch import nn

from pt2e_quant.core.errors import InvariantError
from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.ops import RELU, aten, is_call
from pt2e_quant.graph.pipeline import (
    VERIFY,
    GraphPass,
    Invariant,
    PassResult,
    first_difference,
    graph_pass,
    run_passes,
    trial_run,
)

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x):
        self.count.add_(1)
        return x.relu() + self.count


@pytest.fixture
def gm():
    return torch.export.export(Model(), (X,)).module()


def swap(name, target, gives=()):
    def edit(gm):
        editor = Editor(gm)
        for node in list(gm.graph.nodes):
            if node.target is aten.relu.default:
                editor.replace(node, editor.call(target, node.args[0], like=node))
        return PassResult(changed=editor.finish())

    return GraphPass(name, edit, gives=gives, needs=())


CLAMP = swap("to_threshold", aten.relu6.default)
RIGHT = swap("same", aten.relu.default)
NO_RELU = Invariant(
    "no relu is left",
    lambda gm: next((f"{n.name} left" for n in gm.graph.nodes if is_call(n, RELU)), None),
)


def test_graph_pass_when_a_function_is_decorated_then_a_pass_of_its_name():
    @graph_pass(needs=(), gives=(NO_RELU,))
    def my_pass(gm):
        """Do nothing."""
        return PassResult(changed=False)

    assert isinstance(my_pass, GraphPass)
    assert my_pass.name == "my_pass"
    assert my_pass.gives == (NO_RELU,)


def test_run_when_many_passes_run_then_one_recompile_ends_it(gm, monkeypatch):
    calls = []
    compile_ = type(gm).recompile
    monkeypatch.setattr(type(gm), "recompile", lambda self: calls.append(1) or compile_(self))
    records = run_passes(gm, (RIGHT, RIGHT, RIGHT))
    assert [(r.name, r.changed) for r in records] == [("same", True)] * 3
    assert calls == [1]
    assert all(r.time_s > 0 for r in records)


def test_pass_when_called_alone_then_the_module_runs_the_new_graph(gm):
    swap("negate", aten.neg.default)(gm)
    assert torch.equal(gm(X), -X + 1)


def test_verify_when_outputs_change_then_names_the_pass_and_those_before(gm):
    wrong = swap("wrong", aten.neg.default)
    with pytest.raises(
        InvariantError, match=r"wrong changed the outputs \(output 0: .*\); passes before it: same"
    ):
        run_passes(gm, (RIGHT, wrong), verify=True, sample=((X,), {}))


def test_verify_when_a_pass_breaks_its_promise_then_named(gm):
    liar = swap("liar", aten.relu.default, gives=(NO_RELU,))
    with pytest.raises(InvariantError, match=r"liar broke: no relu is left \(relu_1 left\)"):
        run_passes(gm, (liar,), verify=True)


def insert_relu(gm):
    editor = Editor(gm)
    node = next(n for n in gm.graph.nodes if n.op == "placeholder")
    extra = editor.call(aten.relu.default, node, like=node, after=node)
    editor.replace(node, extra, except_in=[extra])
    return PassResult(changed=editor.finish())


def test_verify_when_a_later_pass_breaks_an_earlier_promise_then_named(gm):
    first = swap("first", aten.relu6.default, gives=(NO_RELU,))
    second = GraphPass("second", insert_relu, needs=(), gives=())
    with pytest.raises(
        InvariantError, match=r"second broke: no relu is left .* passes before it: first"
    ):
        run_passes(gm, (first, second), verify=True)


def test_run_passes_when_a_pass_ends_a_promise_then_it_may_break_it(gm):
    first = swap("first", aten.relu6.default, gives=(NO_RELU,))
    second = GraphPass("second", insert_relu, ends=(NO_RELU,), needs=(), gives=())
    assert [record.changed for record in run_passes(gm, (first, second), verify=True)] == [True] * 2


def test_verify_when_a_need_is_unmet_then_refused_before_the_pass(gm):
    needy = GraphPass("needy", lambda gm: PassResult(changed=False), needs=(NO_RELU,), gives=())
    with pytest.raises(InvariantError, match="needy needs: no relu is left"):
        run_passes(gm, (needy,), verify=True)


def test_verify_when_a_node_has_no_value_then_found(gm):
    def forget(gm):
        node = next(n for n in gm.graph.nodes if n.name == "relu")
        del node.meta["val"]
        return PassResult(changed=True)

    with pytest.raises(InvariantError, match="forget broke: every call carries meta"):
        run_passes(gm, (GraphPass("forget", forget, needs=(), gives=()),), verify=True)


@pytest.mark.parametrize(("value", "verifies"), [("1", True), ("0", False), (None, False)])
def test_run_passes_when_the_environment_asks_then_it_verifies(gm, monkeypatch, value, verifies):
    if value is None:
        monkeypatch.delenv(VERIFY, raising=False)
    else:
        monkeypatch.setenv(VERIFY, value)
    liar = GraphPass("liar", lambda _: PassResult(changed=False), gives=(NO_RELU,), needs=())
    if not verifies:
        run_passes(gm, (liar,))
        return
    with pytest.raises(InvariantError, match="liar broke"):
        run_passes(gm, (liar,))


def test_trial_run_when_it_writes_buffers_then_restored(gm):
    given = X.clone()
    found = trial_run(gm, ((given,), {}))
    assert torch.equal(found[0], X.relu() + 1)
    assert torch.equal(found[1], torch.ones(1)), "the buffer as written"
    assert torch.equal(gm.count, torch.zeros(1)), "and as it is again"
    assert torch.equal(given, X)


def test_verify_when_run_then_buffers_are_left_alone(gm):
    run_passes(gm, (RIGHT,), verify=True, sample=((X,), {}))
    assert torch.equal(gm.count, torch.zeros(1))


def test_run_when_a_pass_raises_then_the_module_still_runs(gm):
    def fail(gm):
        raise InvariantError("no")

    with pytest.raises(InvariantError, match="no"):
        run_passes(
            gm, (swap("negate", aten.neg.default), GraphPass("fail", fail, needs=(), gives=()))
        )
    assert torch.equal(gm(X), -X + 1)
    assert RIGHT(gm).changed is False


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        (torch.ones(3), torch.ones(3) + 1e-5, True),
        (torch.ones(3), torch.ones(3) + 1e-3, False),
        (torch.ones(3).bfloat16(), torch.full((3,), 1.02).bfloat16(), True),
        (torch.tensor([1, 2]), torch.tensor([1, 3]), False),
        (torch.ones(3), torch.ones(3, 1), False),
        (torch.ones(3), torch.ones(3).double(), False),
        (torch.tensor(float("nan")), torch.tensor(float("nan")), True),
        (torch.tensor(float("nan")), torch.tensor(1.0), False),
        (torch.tensor(float("inf")), torch.tensor(float("inf")), True),
        (torch.zeros(0), torch.zeros(0), True),
        (3, 3, True),
        (3, 4, False),
    ],
)
def test_first_difference_when_values_differ_then_only_rounding_is_allowed(a, b, same):
    assert (first_difference([a], [b]) is None) == same


def test_first_difference_when_an_output_is_missing_then_said():
    assert first_difference([1], []) == "1 outputs expected, 0 found"
