"""Norms in training mode: values by the batch's own statistics; the running ones are written."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import pt2e_quant as pq
from tests.parameters import named_subset

pytestmark = pytest.mark.usefixtures("unmeasured")

EXTRAS = {"xnnpack": "executorch", "onnx": "onnxruntime", "cpu": "torch"}
NORMS = {"batch": F.batch_norm, "instance": F.instance_norm}


class OfBuffers(nn.Module):
    """The statistics are the model's own."""

    def __init__(self, norm):
        super().__init__()
        self.norm, self.head, self.own = norm, nn.Linear(6, 6), nn.BatchNorm2d(3)

    def forward(self, x):
        own = self.own
        y = self.norm(x, own.running_mean, own.running_var, own.weight, own.bias, True, 0.3)
        return self.head(x), y, own.running_mean + 1, own.running_var + 1


class OfInputs(nn.Module):
    """The caller gives them."""

    def __init__(self, norm):
        super().__init__()
        self.norm, self.head = norm, nn.Linear(6, 6)

    def forward(self, x, mean, variance):
        return self.head(x), self.norm(x, mean, variance, None, None, True, 0.3)


class OfValues(nn.Module):
    """They are computed before, and read behind."""

    def __init__(self, norm):
        super().__init__()
        self.norm, self.head = norm, nn.Linear(6, 6)

    def forward(self, x):
        mean, variance = x.amax((0, 2, 3)), x.abs().amax((0, 2, 3))
        y = self.norm(x, mean, variance, None, None, True, 0.3)
        return self.head(x), y, mean, variance


def _call(model, batch):
    x = torch.randn(batch, 3, 5, 6) * 3 + 1
    return (x, torch.randn(3), torch.rand(3)) if isinstance(model, OfInputs) else (x,)


@pytest.mark.parametrize("norm", named_subset(NORMS, "batch"))
@pytest.mark.parametrize("kind", [OfBuffers, OfInputs, OfValues])
@pytest.mark.parametrize("backend", EXTRAS)
def test_norm_in_training_when_called_again_then_results_and_statistics_as_torch(
    backend, kind, norm
):
    pytest.importorskip(EXTRAS[backend])
    torch.manual_seed(0)
    model, twin = kind(NORMS[norm]).eval(), kind(NORMS[norm]).eval()
    twin.load_state_dict(model.state_dict())
    sizes = {"x": {0: torch.export.Dim("batch", min=1, max=8)}}
    if kind is OfInputs:
        sizes |= {"mean": None, "variance": None}
    call = _call(model, 2)
    artifact = pq.quantize(
        model,
        call,
        calibration_data=[call],
        backend=backend,
        dynamic_shapes=sizes,
        progress=False,
    )
    for batch in (2, 5, 1):
        given = _call(model, batch)
        copies = [tensor.clone() for tensor in given]
        found, wanted = artifact.run(*given), twin(*copies)
        pairs = zip([*found[1:], *given], [*wanted[1:], *copies], strict=True)
        for left, right in pairs:
            torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-5)
