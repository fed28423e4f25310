import pytest
import torch
from torch import nn

from pt2e_quant.core.errors import InvariantError
from pt2e_quant.passes.batch_norm.detach_batch_norm import attach_batch_norms, detach_batch_norms
from pt2e_quant.passes.batch_norm.fold_batch_norm import fold_trained_batch_norm
from pt2e_quant.passes.cleanup.remove_dropout import attach_dropouts, detach_dropouts

IMAGE = torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(1))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4)
        self.last = nn.BatchNorm2d(4)
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        return self.last(self.drop(self.bn(self.conv(x)).relu()))


def switch(gm, training):
    """As train() and eval() of a prepared module do; a captured one refuses."""
    for child in gm.children():
        child.train(training)


def made(program, settled):
    return program(settled(Net(), IMAGE), (IMAGE,))


def test_batch_norms_when_detached_then_the_graph_shows_none_that_folds(program, settled):
    p = made(program, settled)
    norms = detach_batch_norms(p.gm)
    assert [n.is_folded for n in norms] == [True]
    p.shows(
        """
        x: f32[4, 3, 6, 6] = input
        conv2d: f32[4, 4, 4, 4] = conv2d(x, conv.weight, bias=bn.bias)
        relu: f32[4, 4, 4, 4] = relu(conv2d)
        dropout: f32[4, 4, 4, 4] = dropout(relu, 0.5, False)
        batch_norm_0: f32[4, 4, 4, 4] = call_module batch_norm_0(dropout, None, None, last.weight, last.bias, last.running_mean, last.running_var, last.num_batches_tracked)
        return (batch_norm_0)
        """  # noqa: E501
    )


def test_trained_batch_norm_when_folded_then_stored_in_the_weight(program, settled):
    p = made(program, settled)
    attach_batch_norms(p.gm, detach_batch_norms(p.gm))
    p.gm.recompile()
    switch(p.gm, False)
    p.matches()
    switch(p.gm, True)
    p.gm(IMAGE + 1.0)
    switch(p.gm, False)
    expected = p.gm(IMAGE)
    fold_trained_batch_norm(p.gm)
    assert torch.equal(p.gm(IMAGE), expected)
    assert p.targets()["aten.batch_norm.default"] == 1
    assert not [n for n in p.gm.graph.nodes if n.op == "call_module"]
    assert "conv2d(x, conv.weight, bias=conv.bias)" in p.text
    p.is_idempotent(fold_trained_batch_norm)


def test_fold_when_a_weight_became_computed_then_refused(program, settled):
    p = made(program, settled)
    attach_batch_norms(p.gm, detach_batch_norms(p.gm))
    fold = next(n for n in p.gm.graph.nodes if n.name == "conv_bn_0_fold")
    weight = fold.args[0]
    with p.gm.graph.inserting_before(fold):
        computed = p.gm.graph.call_function(torch.ops.aten.relu.default, (weight,))
    computed.meta["val"] = weight.meta["val"]
    fold.replace_input_with(weight, computed)
    with pytest.raises(InvariantError, match="no constant any more"):
        fold_trained_batch_norm(p.gm)


def test_conv_when_it_has_another_reader_then_its_batch_norm_stays(program, settled):
    class Branched(Net):
        def forward(self, x):
            y = self.conv(x)
            return self.bn(y) + y

    p = program(settled(Branched(), IMAGE), (IMAGE,))
    assert detach_batch_norms(p.gm) == []
    assert "call_module batch_norm_0(conv2d" in p.text
    switch(p.gm, False)
    p.matches()


def test_batch_norm_when_it_has_no_statistics_then_left(program):
    p = program(
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, track_running_stats=False)), (IMAGE,)
    )
    assert detach_batch_norms(p.gm) == []
    assert p.targets()["aten.batch_norm.default"] == 1


def test_dropouts_when_detached_and_attached_then_back_where_they_were(program, settled):
    p = made(program, settled)
    before = p.text
    dropouts = detach_dropouts(p.gm)
    assert [d.p for d in dropouts] == [0.5]
    assert "dropout" not in p.text
    attach_dropouts(p.gm, dropouts)
    assert p.text.replace("dropout_default", "dropout") == before


def test_dropout_when_its_input_has_another_reader_then_stays(program):
    class Beside(nn.Module):
        def forward(self, x):
            return x + nn.functional.dropout(x, 0.5, self.training)

    p = program(Beside(), (IMAGE,))
    assert detach_dropouts(p.gm) == []
    assert p.targets()["aten.dropout.default"] == 1
