import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

import pt2e_quant as pq
from pt2e_quant.core.errors import ConfigError
from pt2e_quant.observers.training.fake_quantize import disable_observer
from pt2e_quant.pt2e import (
    allow_exported_model_train_eval,
    move_exported_model_to_eval,
    move_exported_model_to_train,
)
from pt2e_quant.pt2e.export_utils import WrapperModule, model_is_exported


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 1)
        self.bn = nn.BatchNorm2d(2, eps=0.25, momentum=0.75)
        self.dropout = nn.Dropout(p=0.375)

    def forward(self, x):
        return self.dropout(self.bn(self.conv(x)))


def flags(gm):
    return [
        (n.target._overloadpacket.__name__, n.args[1:])
        for n in gm.graph.nodes
        if "dropout" in str(n.target) or "batch_norm" in str(n.target)
    ]


@pytest.fixture(params=[True, False])
def gm(request):
    return torch.export.export(Net().train(request.param), (torch.randn(2, 1, 3, 3),)).module()


def settings(gm):
    (bn, bn_args), (dropout, dropout_args) = flags(gm)
    assert (bn, dropout) == ("batch_norm", "dropout")
    return bn_args[4:7], dropout_args


def test_modes_when_switched_then_only_the_flags_change(gm):
    for move, training in [
        (move_exported_model_to_eval, False),
        (move_exported_model_to_train, True),
        (move_exported_model_to_train, True),
        (move_exported_model_to_eval, False),
    ]:
        assert move(gm) is gm
        assert settings(gm) == ((training, 0.75, 0.25), (0.375, training))
        assert gm.training is training


def test_eval_when_moved_then_the_same_as_the_module(gm):
    x = torch.randn(2, 1, 3, 3)
    net = Net()
    net.load_state_dict(gm.state_dict(), strict=False)
    move_exported_model_to_eval(gm)
    assert torch.equal(gm(x), net.eval()(x))


def test_train_method_when_allowed_then_it_moves_and_copies_keep_it(gm):
    allow_exported_model_train_eval(gm)
    for model in (gm, copy.deepcopy(gm), copy.deepcopy(copy.deepcopy(gm))):
        assert model.train() is model
        assert settings(model)[1] == (0.375, True)
        model.eval()
        assert settings(model)[1] == (0.375, False)
        model.train(False)
        assert settings(model)[1] == (0.375, False)
    gm.train()
    assert settings(copy.deepcopy(gm))[1] == (0.375, True)


def test_copy_when_it_trains_then_the_original_does_not(gm):
    allow_exported_model_train_eval(gm).eval()
    copy.deepcopy(gm).train()
    assert settings(gm)[1] == (0.375, False)


def test_move_when_no_graph_then_refused():
    with pytest.raises(ConfigError, match="exported"):
        move_exported_model_to_eval(nn.Linear(1, 1))


def test_exported_when_asked_then_only_of_exported_graphs(gm):
    assert model_is_exported(gm)
    assert not model_is_exported(nn.Linear(1, 1))
    assert not model_is_exported(torch.fx.symbolic_trace(nn.Linear(1, 1)))


def test_wrapper_module_when_called_then_the_function_is():
    assert WrapperModule(lambda a, b: a - b)(3, b=1) == 2


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        p = 0.5 if self.training else 0.0
        return self.out(functional.scaled_dot_product_attention(q, k, v, dropout_p=p))


TOKENS = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(0))


def test_attention_when_moved_to_eval_then_nothing_is_dropped_and_in_train_again():
    model = Attention().train()
    gm = torch.export.export(model, (TOKENS,)).module()
    move_exported_model_to_eval(gm)
    torch.testing.assert_close(gm(TOKENS), model.eval()(TOKENS))
    gm = copy.deepcopy(gm)
    move_exported_model_to_train(gm)
    assert not torch.equal(gm(TOKENS), gm(TOKENS))


@pytest.mark.parametrize("name", ["xnnpack", "integer"])
def test_attention_when_trained_with_dropout_then_the_converted_graph_drops_nothing(name):
    quantizer = pq.IntegerQuantizer() if name == "integer" else pq.backends.get(name).quantizer()
    program = torch.export.export(Attention().train(), (TOKENS,))
    prepared = pq.prepare_qat_pt2e(program, quantizer, numerics="integer")
    prepared(TOKENS).sum().backward()
    prepared.apply(disable_observer)
    assert not torch.equal(prepared(TOKENS), prepared(TOKENS))
    expected = prepared.eval()(TOKENS)
    converted = pq.convert_pt2e(prepared)
    reference = pq.integer_reference(converted)
    assert torch.equal(reference(TOKENS), expected)
    assert name != "integer" or pq.audit(converted).is_integer_only
