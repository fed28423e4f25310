import pytest
import torch
from torch import nn

import pt2e_quant as pq
from pt2e_quant.flow.calibrate.sample import sqnr_db


class DeadChannel(nn.Module):
    """A linear of tiny inputs whose bias is large, of which one channel hardly reads them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 6)
        with torch.no_grad():
            self.linear.weight[0] *= 1e-3
            self.linear.bias.fill_(0.7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


def tiny(seed: int) -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(seed)) * 1e-5


@pytest.mark.parametrize("backend", ["onnx", "xnnpack"])
def test_bias_when_its_steps_pass_int32_then_the_weight_scale_makes_room(backend):
    target = pq.backends.get(backend)
    torch.manual_seed(0)
    model = DeadChannel().eval()
    program = torch.export.export(model, (tiny(0),))
    prepared = pq.prepare_pt2e(program, target.quantizer("int8"))
    pq.calibrate(prepared, [(tiny(seed),) for seed in range(4)], progress=False)
    graph = pq.convert_pt2e(prepared)
    x = tiny(9)
    assert sqnr_db([model(x).detach()], [graph(x)]) > 40
    biases = [v for name, v in graph.state_dict().items() if name.endswith("bias_q")]
    assert all(int(v.abs().max()) <= 2**30 + 2**8 for v in biases)  # a float32 product
    if biases:
        assert any("int32 holds the bias" in note for note in pq.provenance_of(graph).notes)
    artifact = target.lower(graph)
    assert sqnr_db([model(x).detach()], [artifact.run(x)]) > 35


def test_bias_when_int32_holds_it_then_the_weight_keeps_its_scale():
    target = pq.backends.get("xnnpack")
    model = nn.Linear(4, 6).eval()
    x = torch.randn(3, 4)
    prepared = pq.prepare_pt2e(torch.export.export(model, (x,)), target.quantizer("int8"))
    pq.calibrate(prepared, [(x,)], progress=False)
    graph = pq.convert_pt2e(prepared)
    scale = graph.state_dict()["weight_scale"]
    torch.testing.assert_close(scale, model.weight.detach().abs().amax(1) / 127)
