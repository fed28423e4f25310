"""The export's own remarks on recurrent layers are dropped, those on the user's code are not."""

import warnings

import pytest
import torch
from torch import nn

from pt2e_quant.core.export import export


class Assigning(nn.Module):
    def forward(self, x):
        self.kept = x + 1
        return self.kept * 2


def test_export_when_a_layer_is_recurrent_then_nothing_is_warned_of():
    model = nn.Sequential(nn.GRU(4, 4, 2, bidirectional=True)).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        export(model, (torch.ones(3, 1, 4),))


def test_export_when_the_model_assigns_a_tensor_then_torch_warns():
    model = Assigning()
    model.kept = torch.zeros(2)
    with pytest.warns(UserWarning, match="self.kept was assigned"):
        export(model, (torch.ones(2),))
