"""Recurrent layers written out step by step."""

import pytest
import torch
from torch import nn

import pt2e_quant as pq
from pt2e_quant.core.recurrent_ops import RecurrentLayer, Rounding
from pt2e_quant.graph.pipeline import run_passes
from pt2e_quant.passes.cleanup.strip_guards import strip_guards
from pt2e_quant.passes.recurrent.split_recurrent import split_recurrent
from pt2e_quant.passes.recurrent.write_steps import write_steps

pytestmark = pytest.mark.filterwarnings("ignore:The tensor attributes self:UserWarning")
SPLIT = split_recurrent(lambda node, sizes: Rounding.NONE)
LAYERS = {
    "lstm": lambda: nn.LSTM(4, 6, num_layers=2, bidirectional=True),
    "projected": lambda: nn.LSTM(4, 6, proj_size=3),
    "gru": lambda: nn.GRU(4, 6, bidirectional=True, batch_first=True),
    "rnn": lambda: nn.RNN(4, 6),
    "relu": lambda: nn.RNN(4, 6, nonlinearity="relu", bias=False),
}


def split(model, *inputs, **options):
    gm = torch.export.export(model.eval(), inputs, **options).module()
    run_passes(gm, (strip_guards, SPLIT))
    return gm


@pytest.mark.parametrize("name", list(LAYERS))
def test_layer_when_written_out_then_the_same_values(name):
    torch.manual_seed(0)
    x = torch.randn(5, 3, 4)
    gm = split(LAYERS[name](), x)
    with torch.no_grad():
        expected = gm(x)
        (record,) = run_passes(gm, (write_steps,))
        found = gm(x)
    assert {note.text.split(" are")[0] for note in record.notes} == {
        f"its {3 if name == 'gru' else 5} steps"
    }
    assert not [n for n in gm.graph.nodes if n.target is RecurrentLayer]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert not write_steps(gm).changed


def test_layer_when_its_steps_are_many_then_it_stays():
    gm = split(nn.GRU(4, 6), torch.randn(65, 1, 4))
    (record,) = run_passes(gm, (write_steps,))
    assert [note.text for note in record.notes] == [
        "it has 65 steps, more than the 64 that are written out"
    ]
    assert not record.changed


@pytest.mark.parametrize("name", ["lstm", "gru", "rnn"])
def test_layer_when_its_biases_are_large_then_no_sum_of_the_first_step_overflows(name):
    # Zeros have the least scale that there is; a bias in steps of it was beyond int32.
    torch.manual_seed(0)
    model = LAYERS[name]().eval()
    with torch.no_grad():
        for key, value in model.named_parameters():
            if "bias" in key:
                value.mul_(5)
    batches = [torch.randn(5, 3, 4) for _ in range(3)]
    prepared = pq.prepare_pt2e(
        torch.export.export(model, (batches[0],)), pq.IntegerQuantizer(), int_only=True
    )
    quantized = pq.convert_pt2e(pq.calibrate(prepared, batches, progress=False))
    expected = quantized(batches[0])[0]
    found = pq.integer_reference(quantized)(batches[0])[0]
    assert (found - expected).abs().max() < 0.05
