"""Converted graphs through the freezing passes of torch's Inductor, beside torchao's lowering."""

import copy
import warnings
from collections import Counter

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, export

from pt2e_quant.core.errors import InputError
from pt2e_quant.core.read_capture import capture_of
from pt2e_quant.pt2e import quantize_pt2e as ours
from pt2e_quant.pt2e.lowering import lower_pt2e_quantized_to_x86

theirs = pytest.importorskip("torchao.quantization.pt2e.quantize_pt2e")
lowering = pytest.importorskip("torchao.quantization.pt2e.lowering")
x86 = pytest.importorskip("torchao.quantization.pt2e.quantizer.x86_inductor_quantizer")

pytestmark = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="this torch is built without oneDNN"
)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.bn = nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 8, 3, padding=1)
        self.last = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.bn(self.first(x)))
        y = torch.relu(y + self.second(y))
        return self.last(y.mean((2, 3)))


class Counting(Residual):
    """Writes a buffer: a call counter, and a running sum that the result holds."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))
        self.sums = nn.Module()
        self.sums.register_buffer("total", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        y = super().forward(x)
        self.sums.total.add_(y.detach().mean(0))
        return y + self.calls + self.sums.total


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16), nn.Linear(16, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


def seeded(kind):
    """The model with the same weights whatever was imported before."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return kind()


IMAGE, ROW = (torch.ones(2, 3, 8, 8) * 0.5,), (torch.linspace(-1, 1, 64).reshape(4, 16),)


def quantizer(is_dynamic=False):
    config = x86.get_default_x86_inductor_quantization_config(is_dynamic=is_dynamic)
    return x86.X86InductorQuantizer().set_global(config)


def converted(flow, model, inputs, shapes=None, *, is_dynamic=False):
    program = export(copy.deepcopy(model).eval(), inputs, dynamic_shapes=shapes)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        prepared = flow.prepare_pt2e(program.module(), quantizer(is_dynamic))
        with torch.no_grad():
            prepared(*inputs)
        return flow.convert_pt2e(prepared)


def operators(gm):
    return Counter(str(n.target) for n in gm.graph.nodes if n.op == "call_function")


@pytest.mark.parametrize(("model", "inputs"), [(seeded(Residual), IMAGE), (seeded(Mlp), ROW)])
@pytest.mark.parametrize("is_dynamic", [False, True])
def test_lowering_when_compared_with_torchao_then_the_same_operators_are_fused(
    model, inputs, is_dynamic
):
    torch.manual_seed(0)
    lowered = []
    for flow, lower in (
        (theirs, lowering.lower_pt2e_quantized_to_x86),
        (ours, lower_pt2e_quantized_to_x86),
    ):
        lowered.append(lower(converted(flow, model, inputs, is_dynamic=is_dynamic), inputs))
    reference, found = lowered
    assert operators(found) == operators(reference)
    assert sum(n for name, n in operators(found).items() if "onednn.q" in name) >= 1
    with torch.no_grad():
        torch.testing.assert_close(found(*inputs), reference(*inputs), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("model", [seeded(Residual), seeded(Counting)])
def test_lowering_when_sizes_are_dynamic_and_buffers_written_then_both_stay(model):
    shapes = ({0: Dim("batch", min=2, max=64)},)
    gm = converted(ours, model, IMAGE, shapes)
    twin = copy.deepcopy(gm)
    lowered = lower_pt2e_quantized_to_x86(gm, IMAGE)
    assert any("onednn.qconv" in name for name in operators(lowered))
    assert set(capture_of(lowered).mutated_buffers) == set(capture_of(gm).mutated_buffers)
    with torch.no_grad():
        for batch in (2, 5, 9, 5):
            x = torch.randn(batch, 3, 8, 8, generator=torch.Generator().manual_seed(batch))
            expected, found = twin(x), lowered(x)
            # a requantized activation may round the other way: one step of the widest tensor
            step = 0.02 * float(expected.abs().max())
            torch.testing.assert_close(found, expected, rtol=0, atol=step)
    state, expected_state = lowered.state_dict(), twin.state_dict()
    for name in capture_of(gm).mutated_buffers:
        torch.testing.assert_close(state[name], expected_state[name], rtol=0, atol=0.1)
        assert state[name].abs().max() > 0


def test_lowering_when_done_then_no_weight_is_left_beside_its_packed_form():
    lowered = lower_pt2e_quantized_to_x86(converted(ours, Residual(), IMAGE), IMAGE)
    names = {str(n.target) for n in lowered.graph.nodes if n.op == "get_attr"}
    held = dict(lowered.named_buffers()) | dict(lowered.named_parameters())
    assert set(held) <= names
    assert not [n for n in held if n.endswith(("weight", "weight_q"))]


def test_lowering_when_an_input_is_wrong_then_refused_with_the_fix():
    gm = converted(ours, Residual(), IMAGE)
    lowered = lower_pt2e_quantized_to_x86(gm, IMAGE)
    for call in (lowered, lambda x: lower_pt2e_quantized_to_x86(gm, (x,))):
        with pytest.raises(InputError, match="size 5 in dimension 0") as error:
            call(torch.ones(5, 3, 8, 8))
        assert "dynamic_shapes=" in error.value.fix
