"""What the export drops of torch's remarks, and what it does about inputs that are one tensor."""

import copy
import warnings

import pytest
import torch
from torch import nn

import pt2e_quant as pq
from pt2e_quant.core.errors import Pt2eQuantWarning
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


class TwoStates(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, h, *, c):
        return self.first(h) + self.second(c)


def test_export_when_one_tensor_is_given_twice_then_the_program_reads_both():
    model, zeros = TwoStates().eval(), torch.zeros(2, 4)
    program = export(model, (zeros,), {"c": zeros})
    h, c = torch.randn(2, 4), torch.randn(2, 4)
    torch.testing.assert_close(program.module()(h, c=c), model(h, c=c))


def test_prepare_when_torch_merged_two_inputs_then_warns_by_their_names():
    model, zeros = TwoStates().eval(), torch.zeros(2, 4)
    merged = torch.export.export(model, (zeros,), {"c": zeros})
    quantizer = pq.backends.get("xnnpack").quantizer("int8")
    with pytest.warns(Pt2eQuantWarning, match="the inputs h, c were one tensor .* reads c alone"):
        pq.prepare(merged, quantizer)
    with pytest.warns(Pt2eQuantWarning, match="the inputs h, c were one tensor"):
        pq.prepare(copy.deepcopy(merged), quantizer)
    apart = torch.export.export(model, (zeros,), {"c": zeros.clone()})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pq.prepare(apart, quantizer)


def test_prepare_when_a_program_was_copied_then_other_names_of_inputs_do_no_harm():
    program = torch.export.export(nn.Sequential(nn.Linear(4, 4)), (torch.zeros(2, 4),))
    copied = copy.deepcopy(program)
    assert program.graph_signature.user_inputs == ("input",)
    assert copied.graph.find_nodes(op="placeholder")[-1].name != "input"
    pq.prepare(copied, pq.backends.get("xnnpack").quantizer("int8"))
