"""Calibration data of the eager flow's algorithms: sizes that differ, and data that is no use."""

import pytest
import torch
from torch import nn

import pt2e_quant as pq
from pt2e_quant.core.errors import CalibrationError, InputError, Pt2eQuantError
from pt2e_quant.tensors import QuantizedTensor
from pt2e_quant.tensors.export_batches import export_batches


def net():
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
    return nn.Sequential(layers, nn.Identity()).eval()


def rows(*counts, width=64):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(count, width, generator=generator) for count in counts]


def spoilt(value, batches):
    batches[1][0, 3] = value
    return batches


@pytest.mark.parametrize("algorithm", ["gptq", "awq", "adaround"])
def test_algorithms_when_the_last_batch_is_smaller_then_they_take_it(algorithm):
    model = net()
    pq.quantize_(model, "w4_g32", algorithms=[algorithm], calibration_data=rows(8, 8, 3))
    assert isinstance(model[0][0].weight, QuantizedTensor)


def test_export_when_sizes_differ_then_they_alone_are_free():
    program = export_batches(net().train(), [(x,) for x in rows(1, 5)])
    (value,) = [n.meta["val"] for n in program.graph.nodes if n.name == "input"]
    assert isinstance(value.shape[0], torch.SymInt)
    assert value.shape[1] == 64
    (same,) = [
        n.meta["val"] for n in export_batches(net(), rows(5, 5)).graph.nodes if n.name == "input"
    ]
    assert same.shape == (5, 64)


def test_export_when_the_module_trains_then_its_modes_stay():
    model = net().train()
    model[0].eval()
    export_batches(model, rows(4))
    assert (model.training, model[0].training, model[0][0].training) == (True, False, False)


@pytest.mark.parametrize("algorithm", ["gptq", "awq", "adaround", "smooth_quant"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_algorithms_when_data_is_not_finite_then_refused(algorithm, value):
    if (algorithm, value) == ("adaround", float("inf")):
        pytest.skip("inputs may be masks of -inf")
    model = net()
    scheme = "int8" if algorithm == "smooth_quant" else "w4_g32"
    data = spoilt(value, rows(4, 4, 4))
    with pytest.raises(CalibrationError, match="NaN or infinity") as refused:
        pq.quantize_(model, scheme, algorithms=[algorithm], calibration_data=data)
    assert refused.value.fix
    assert "node" in str(refused.value)
    assert type(model[0][0].weight) is nn.Parameter


@pytest.mark.parametrize("algorithms", [(), ("gptq",)])
@pytest.mark.parametrize(
    ("data", "number", "words"),
    [
        (rows(4, width=63), 0, "cannot be multiplied"),
        ([*rows(4), *rows(4, width=63)], 1, "cannot be multiplied"),
        ([torch.ones(4, 64, dtype=torch.int64)], 0, "dtype|floating"),
        (["text"], 0, "[Tt]ensor"),
    ],
)
def test_data_when_the_module_fails_on_it_then_batch_and_module_are_named(
    data, number, words, algorithms
):
    model = net()
    with pytest.raises(Pt2eQuantError, match=words) as refused:
        pq.quantize_(model, "int8", algorithms=algorithms, calibration_data=data)
    assert f"calibration batch {number}" in refused.value.what
    assert '"0.0"' in refused.value.what
    assert type(model[0][0].weight) is nn.Parameter


def test_data_when_empty_then_refused_by_the_call_that_gives_it():
    with pytest.raises(CalibrationError, match="calibration data"):
        pq.quantize_(net(), "w4_g32", algorithms=["gptq"], calibration_data=[])


def test_static_inputs_when_not_finite_then_the_module_is_named():
    with pytest.raises(CalibrationError, match=r'input of "0.0": NaN or infinity'):
        pq.quantize_(net(), "int8", calibration_data=spoilt(float("nan"), rows(4, 4)))


def test_awq_when_all_inputs_are_zero_then_it_changes_nothing():
    model = net()
    pq.quantize_(model, "w4_g32", algorithms=["awq"], calibration_data=[torch.zeros(4, 64)])
    assert bool(model(torch.randn(2, 64)).isfinite().all())


def test_module_when_its_own_forward_fails_then_no_part_is_named():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(64, 8)

        def forward(self, x):
            return self.layer(x) + x.no_such_name

    with pytest.raises(InputError, match="fails on calibration batch 0: AttributeError"):
        pq.quantize_(Own(), "w4_g32", algorithms=["gptq"], calibration_data=rows(4))
