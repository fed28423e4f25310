"""Results that quantization reaches are told from those that are float throughout."""

import torch
from torch import Tensor, nn

import pt2e_quant as pq
from pt2e_quant.backends.gate import rounded_results


class Two(nn.Module):
    """A quantized linear, a float function beside it, and a buffer that takes the linear's mean."""

    def __init__(self, *, writes: bool = False, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.linear, self.writes = nn.Linear(8, 8).to(dtype), writes
        self.register_buffer("mean", torch.zeros(8, dtype=dtype))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.linear(x)
        if self.writes:
            self.mean.copy_(y.mean(0))
        return y.relu(), torch.sin(x) + self.mean


def converted(model: nn.Module, dtype: torch.dtype = torch.float32):
    torch.manual_seed(0)
    batch = (torch.randn(4, 8, dtype=dtype),)
    exported = torch.export.export(model.eval(), batch)
    prepared = pq.prepare_pt2e(exported, pq.backends.get("onnx").quantizer("int8"))
    return pq.convert_pt2e(pq.calibrate(prepared, [batch], progress=False))


def test_rounded_results_when_one_of_two_is_float_then_tells_them_apart():
    assert rounded_results(converted(Two())) == (True, False)


def test_rounded_results_when_rounded_values_are_written_then_counts_every_result():
    assert rounded_results(converted(Two(writes=True))) == (True, True)


def test_rounded_results_when_values_have_16_bits_then_counts_them():
    model = Two(dtype=torch.bfloat16)
    program = torch.export.export(model, (torch.randn(4, 8, dtype=torch.bfloat16),))
    assert rounded_results(program.module()) == (True, True)


def test_rounded_results_when_a_branch_quantizes_then_counts_its_result():
    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return torch.cond(x.sum() > 0, self.linear, torch.neg, (x,)), x.cos()

    torch.manual_seed(0)
    batch = (torch.randn(4, 8).abs(),)
    exported = torch.export.export(Branch().eval(), batch)
    prepared = pq.prepare_pt2e(exported, pq.backends.get("cpu").quantizer("int8"))
    calls = [batch, (-batch[0],)]
    gm = pq.convert_pt2e(pq.calibrate(prepared, calls, progress=False))
    assert rounded_results(gm) == (True, False)
