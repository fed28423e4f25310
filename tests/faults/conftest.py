"""A small model of two inputs with a dynamic batch, lowered once for each backend."""

from importlib.util import find_spec

import pytest
import torch
from torch import nn
from torch.export import Dim, export

import pt2e_quant as pq

EXTRAS = {"xnnpack": "executorch", "onnx": "onnxruntime", "cpu": "torch"}


class TwoInputs(nn.Module):
    """An image and a row for each; a convolution, a linear, a result of two tensors."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.linear = nn.Linear(8 + 5, 6)

    def forward(self, image, row):
        y = torch.relu(self.conv(image)).amax((2, 3))
        z = self.linear(torch.cat([y, row], 1))
        return {"logits": z, "best": z.argmax(1)}


def call(batch: int = 2, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(batch, 3, 6, 6, generator=generator),
        torch.randn(batch, 5, generator=generator),
    )


def calls(count: int):
    return [call(2, seed) for seed in range(1, count + 1)]


def exported():
    torch.manual_seed(0)
    batch = Dim("batch", min=1, max=8)
    return export(TwoInputs().eval(), call(), dynamic_shapes=({0: batch}, {0: batch}))


def target_of(name: str):
    if find_spec(EXTRAS[name]) is None:
        pytest.skip(f"needs {EXTRAS[name]}")
    target = pq.backends.get(name)
    return target.allowing_slower() if name == "cpu" else target


def lowered(name: str):
    return pq.quantize(exported(), calibration_data=calls(4), backend=target_of(name))


@pytest.fixture(scope="module", params=EXTRAS)
def backend(request):
    return request.param


@pytest.fixture(scope="module")
def artifact(backend):
    return lowered(backend)


def equal(left, right) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)
