"""A prepared graph's recurrent layers compute in float; those of a converted one round."""

import pytest
import torch
from torch import nn

import pt2e_quant as pq
from pt2e_quant.core.recurrent_ops import ROUNDING_KEY, RecurrentLayer, Rounding
from pt2e_quant.flow.calibrate.sample import sqnr_db
from pt2e_quant.graph.ops import arguments
from pt2e_quant.passes.recurrent.round_recurrent import as_rounded, round_recurrent
from pt2e_quant.passes.recurrent.split_recurrent import split_recurrent

pytestmark = pytest.mark.filterwarnings("ignore:The tensor attributes:UserWarning")


class Faint(nn.Module):
    """An LSTM of inputs in many orders of magnitude, of which 8 bits keep the greatest."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lstm = nn.LSTM(16, 24, 2)

    def forward(self, x):
        return self.lstm(x)[0]


def draw(seed=0):
    x = torch.randn(12, 3, 16, generator=torch.Generator().manual_seed(seed))
    return x * torch.logspace(-1, 3, 16)


def split(rounding):
    gm = torch.export.export(Faint().eval(), (draw(),)).module(check_guards=False)
    split_recurrent(lambda node, sizes: rounding)(gm)
    return gm


def layers(gm):
    return gm.graph.find_nodes(op="call_function", target=RecurrentLayer)


@pytest.mark.parametrize("rounding", [Rounding.PER_TENSOR, Rounding.PER_ROW])
def test_graph_when_prepared_then_it_is_float_and_rounds_behind_the_pass(rounding):
    gm, x = split(rounding), draw()
    with torch.no_grad():
        expected = Faint()(x)
        torch.testing.assert_close(gm(x), expected)
        assert [n.meta[ROUNDING_KEY] for n in layers(gm)] == [rounding] * 2
        assert round_recurrent(gm).changed
        gm.recompile()
        assert 5 < sqnr_db(expected, gm(x)) < 50
    assert [arguments(n)["rounding"] for n in layers(gm)] == [rounding] * 2
    assert not round_recurrent(gm).changed


def test_graph_when_nothing_is_to_round_then_nothing_is_changed():
    gm = split(Rounding.NONE)
    assert not round_recurrent(gm).changed
    assert all(as_rounded(n) is RecurrentLayer for n in layers(gm))


def test_layer_when_called_as_rounded_then_it_is_the_converted_one():
    gm = split(Rounding.PER_ROW)
    first = layers(gm)[0]
    torch.manual_seed(0)
    args = draw(), torch.randn(3, 24), torch.randn(3, 24), torch.randn(96, 16), torch.randn(96, 24)
    rest = torch.zeros(96), torch.zeros(96), None, "lstm", False
    found = as_rounded(first)(*args, *rest, "none")
    for a, b in zip(found, RecurrentLayer(*args, *rest, "per_row"), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.usefixtures("unmeasured", "integers_everywhere")
@pytest.mark.parametrize("by_block", [False, True])
@pytest.mark.parametrize("backend", ["xnnpack", "onnx", "cpu"])
def test_report_when_layers_round_then_its_sqnr_is_from_the_model(backend, by_block, tmp_path):
    """Below what the artifact loses stands no alarm, and above it no false calm."""
    pytest.importorskip({"onnx": "onnx", "xnnpack": "executorch"}.get(backend, "torch"))
    model, data = Faint().eval(), [(draw(seed),) for seed in range(6)]
    artifact = pq.quantize(
        model,
        data[0],
        calibration_data=data,
        backend=pq.backends.get(backend).allowing_slower(),
        resume=tmp_path / "state" if by_block else None,
        progress=False,
    )
    with torch.no_grad():
        real = sqnr_db(model(*data[0]), artifact.run(*data[0]))
    assert artifact.report.sqnr_float_db == pytest.approx(real, abs=0.2)
