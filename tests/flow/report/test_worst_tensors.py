"""A graph far from its float model is warned of, and the tensor at fault is named first."""

import warnings

import pytest
import torch
from torch import nn

import pt2e_quant as pq
from pt2e_quant.core.errors import Pt2eQuantWarning
from pt2e_quant.flow.calibrate.sample import sample_of
from pt2e_quant.flow.report.worst_tensors import warn_if_low, worst_tensors


class _Masked(nn.Module):
    """The second linear's input has one value that leaves 255 steps for nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # Not one value for each channel alone, which would become part of the first one's bias.
        return self.second(self.first(x) + torch.tensor([[0.0] * 7 + [1e4]] * 4))


def model_of(kind):
    torch.manual_seed(0)
    model = kind().eval()
    if kind is _Masked:
        with torch.no_grad():
            model.second.weight[:, 7] = 0
    return model


class _Root(nn.Module):
    """A root of a linear less the same in float, which rounding makes negative."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        same = (x.unsqueeze(1) * self.first.weight).sum(-1) + self.first.bias
        return torch.sqrt(self.first(x) - same + 1e-4)


class _Plain(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))


X = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))


def quantized(kind, backend):
    program = torch.export.export(model_of(kind), (X,))
    prepared = pq.prepare_pt2e(program, backend.quantizer())
    pq.calibrate(prepared, [X], progress=False)
    return pq.convert_pt2e(prepared)


def test_worst_tensors_when_a_range_is_poisoned_then_its_tensor_is_first(plain_backend):
    gm = quantized(_Masked, plain_backend)
    losses = worst_tensors(gm, sample_of(gm))
    assert losses[0].name == "add"
    assert losses[0].sqnr_db < 5 < 20 < losses[1].sqnr_db


def test_worst_tensors_when_all_is_well_then_int8_loses_little(plain_backend):
    gm = quantized(_Plain, plain_backend)
    losses = worst_tensors(gm, sample_of(gm), count=100)
    assert {"input", "weight"} <= {record.role for record in pq.provenance_of(gm).tensors}
    assert losses
    assert all(30 < loss.sqnr_db < 70 for loss in losses if "bias" not in loss.name)


def test_warning_when_the_ratio_is_low_or_not_then_given_or_not(plain_backend):
    gm = quantized(_Plain, plain_backend)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_if_low(gm, sample_of(gm), None)
        warn_if_low(gm, sample_of(gm), 15.0)
    with pytest.warns(Pt2eQuantWarning, match=r"at 3\.0 dB SQNR .*set_module_name"):
        warn_if_low(gm, sample_of(gm), 3.0)


def test_quantize_when_the_graph_is_far_from_float_then_warns_with_the_tensor(plain_backend):
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    with pytest.warns(Pt2eQuantWarning, match=r"worst tensors have: add"):
        pq.quantize(model_of(_Masked), (x,), calibration_data=[x], backend="plain", progress=False)


def test_quantize_when_no_data_is_needed_then_the_example_inputs_are_compared():
    pytest.importorskip("onnxruntime")
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    artifact = pq.quantize(model_of(_Plain), (x,), backend="onnx", recipe="w8", progress=False)
    assert artifact.report.sqnr_float_db > 30


@pytest.mark.parametrize("backend", ["xnnpack", "onnx"])
@pytest.mark.usefixtures("integers_everywhere")
def test_warning_when_rounding_gives_nan_then_says_where_it_begins(backend):
    with pytest.warns(
        Pt2eQuantWarning, match=r"gives NaN .* from sqrt \(.*torch\.sqrt\(.* on; .* first\.weight"
    ):
        pq.quantize(
            model_of(_Root),
            (X,),
            calibration_data=[X],
            backend=backend,
            progress=False,
        )
