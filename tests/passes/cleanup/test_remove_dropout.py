import torch
import torch.nn.functional as F
from torch import nn

from pt2e_quant.passes.cleanup.remove_dropout import remove_dropout

X = torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(0))


class Drops(nn.Module):
    def __init__(self, p: float = 0.5, always: bool = False) -> None:
        super().__init__()
        self.drop = nn.Dropout(p)
        self.always = always

    def forward(self, x):
        y = self.drop(x.relu())
        return F.dropout1d(F.dropout(y, 0.1, training=self.always), 0.5, training=False)


def test_dropout_when_in_eval_mode_then_removed(program):
    p = program(Drops(), (X,))
    p.shows(
        """
        x: f32[2, 4, 3] = input
        relu: f32[2, 4, 3] = relu(x)
        dropout: f32[2, 4, 3] = dropout(relu, 0.5, False)
        dropout_1: f32[2, 4, 3] = dropout(dropout, 0.1, False)
        feature_dropout: f32[2, 4, 3] = feature_dropout(dropout_1, 0.5, False)
        return (feature_dropout)
        """
    )
    p.apply(remove_dropout)
    p.shows(
        """
        x: f32[2, 4, 3] = input
        relu: f32[2, 4, 3] = relu(x)
        return (relu)
        """
    )
    p.matches().is_idempotent(remove_dropout)


def test_dropout_when_active_then_stays(program):
    p = program(Drops(always=True), (X,))
    result = remove_dropout(p.gm)
    assert [n.text for n in result.notes if n.skipped] == [
        "dropout is in training mode: export the model after eval()"
    ]
    assert p.targets()["aten.dropout.default"] == 1


def test_dropout_when_its_rate_is_zero_in_training_then_removed(program):
    p = program(Drops(p=0.0), (X,), train=True)
    remove_dropout(p.gm)
    assert "dropout(" not in p.text
