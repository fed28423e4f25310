"""A lowered module as a part of a larger model: under torch.compile, and where gradients are on."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pt2e_quant.backends import get

pytestmark = pytest.mark.usefixtures("unmeasured")

CPU = get("cpu")
BATCH = torch.export.Dim("n", max=64)


class Net(nn.Module):
    """Residual sums of a convolution and of a linear, and a float pool between them."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.c, self.d = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x):
        y = torch.relu(self.a(x))
        y = F.adaptive_avg_pool2d(torch.relu(self.b(y) + y), 1).flatten(1)
        return self.d(self.c(y) + y)


class Around(nn.Module):
    """Float operators before and behind a quantized part."""

    def __init__(self, part):
        super().__init__()
        self.part, self.head = part, nn.Linear(4, 3)

    def forward(self, x):
        return torch.relu(self.head(self.part(2 * x)))


@pytest.fixture(params=["int8", "int8_dynamic"])
def artifact(request, quantize_with, make_noise):
    torch.manual_seed(0)
    inputs = (make_noise(2, 3, 8, 8),)
    quantizer = CPU.quantizer(request.param)
    return CPU.lower(quantize_with(Net(), inputs, quantizer, dynamic_shapes=({0: BATCH},)))


def test_module_when_gradients_are_on_then_the_same_result(artifact, make_noise):
    x = make_noise(3, 3, 8, 8)
    assert torch.equal(artifact.module(x).detach(), artifact.run(x))


@pytest.mark.parametrize(
    "backend",
    ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)],  # compiles C++
)
@pytest.mark.filterwarnings("ignore")  # torch's own, at compilation
def test_module_when_a_part_of_a_compiled_model_then_called_as_it_is(artifact, make_noise, backend):
    torch._dynamo.reset()
    model = Around(artifact.module).eval()
    compiled = torch.compile(model, backend=backend)
    for n in (2, 5):
        x = make_noise(n, 3, 8, 8, seed=n)
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), model(x))
    torch._dynamo.reset()


def test_module_when_a_whole_graph_is_wanted_then_the_error_says_why(artifact, make_noise):
    torch._dynamo.reset()
    compiled = torch.compile(Around(artifact.module), backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="packed for oneDNN"):
        compiled(make_noise(2, 3, 8, 8))
    torch._dynamo.reset()
