"""Inputs that a model writes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("onnxruntime", reason="the extra onnx is not installed")

import pt2e_quant as pq


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.register_buffer("mean", torch.zeros(16))

    def forward(self, x: Tensor, given: Tensor) -> Any:
        given.add_(1.0)
        return self.linear(x + given)


class Part(Whole):
    def forward(self, x: Tensor, given: Tensor) -> Any:
        before = self.linear(x)
        given[:, 0] = given[:, 1] * 2
        return before + given, 3


class WithBuffer(Whole):
    def forward(self, x: Tensor, given: Tensor) -> Any:
        self.mean.add_(x.mean(0))
        x.mul_(2.0)
        given.copy_(x)
        return self.linear(x) + self.mean


@pytest.mark.parametrize("model_class", [Whole, Part, WithBuffer])
def test_input_when_the_model_writes_it_then_the_caller_sees_what_the_float_model_leaves(
    model_class: type[Whole], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = model_class().eval()
    calls = [(torch.randn(4, 16), torch.randn(4, 16)) for _ in range(3)]
    sample, first, second = ([value.clone() for value in call] for call in calls)
    artifact = pq.quantize(
        model,
        (sample[0], sample[1]),
        calibration_data=[tuple(value.clone() for value in call) for call in calls],
        backend="onnx",
        recipe="int8",
        progress=False,
    )
    for given, kept in zip(sample, calls[0], strict=True):
        assert torch.equal(given, kept)  # lowering and its check write copies
    artifact.save(tmp_path / "model.onnx")
    for program in (artifact, pq.backends.get("onnx").load(tmp_path / "model.onnx")):
        for call in (first, second):
            expected, found = ([value.clone() for value in call] for _ in range(2))
            model(*expected)
            program.run(*found)
            for wanted, got in zip(expected, found, strict=True):
                torch.testing.assert_close(got, wanted)


def test_input_when_it_is_not_written_then_the_model_has_no_output_for_it() -> None:
    class Plain(Whole):
        def forward(self, x: Tensor, given: Tensor) -> Any:
            h = x + given
            return self.linear(h.add_(1.0))

    x = torch.randn(4, 16), torch.randn(4, 16)
    artifact: Any = pq.quantize(
        Plain().eval(), x, calibration_data=[x], backend="onnx", recipe="int8", progress=False
    )
    assert len(artifact.session.get_outputs()) == 1


def test_input_when_it_is_written_in_half_precision_before_another_then_it_lowers() -> None:
    """Casts to float32 stand between the inputs."""

    class First(Whole):
        def forward(self, x: Tensor, given: Tensor) -> Any:
            x.mul_(2.0)
            return self.linear(x) + self.linear(given)

    torch.manual_seed(0)
    model = First().eval().to(torch.float16)
    given = torch.randn(4, 16).to(torch.float16), torch.randn(4, 16).to(torch.float16)
    artifact = pq.quantize(model, tuple(v.clone() for v in given), backend="onnx", recipe="w8")
    expected, found = (tuple(v.clone() for v in given) for _ in range(2))
    torch.testing.assert_close(artifact.run(*found), model(*expected), rtol=0, atol=0.05)
    assert torch.equal(found[0], expected[0])
