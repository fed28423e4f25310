"""Integer and bool operands of functions with real results are cast, with the same values."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import pt2e_quant as pq
from pt2e_quant.passes.cleanup.promote_integers import promote_integers

BACKENDS = ["cpu", "onnx", "xnnpack"]
FUNCTIONS = {
    "number minus": lambda m: 1.0 - m,
    "number minus parts": lambda m: torch.rsub(m, 0.5, alpha=2),
    "minus": lambda m: m - 0.5,
    "times": lambda m: m * 0.5,
    "number by": lambda m: 1.5 / (m + 1),
    "floor division": lambda m: m // 1.5,
    "floor division of reals": lambda m: m.float() // 1.5,
    "remainder": lambda m: m % 1.5,
    "remainder of a number": lambda m: 5.5 % (m + 1),
    "remainder of a number by reals": lambda m: 5.5 % (m.float() + 1),
    "clamp": lambda m: m.clamp(0.5, 1.5),
    "clamp from below": lambda m: torch.clamp_min(m, 0.5),
    "angle": lambda m: torch.atan2(m + 1, m + 2),
    "root": lambda m: (m + 1).rsqrt(),
    "power": lambda m: m**0.5,
    "softmax": lambda m: m.softmax(1, dtype=torch.float32),
    "mean": lambda m: m.mean(1, keepdim=True, dtype=torch.float32),
    "greatest of all": lambda m: m.amax() * 0.5 + m,
    "least of reals": lambda m: (m * 0.5).amin() + m,
    "maximum with reals": lambda m: torch.maximum(m, m * 0.7),
}


class Masked(nn.Module):
    """A linear, and a function of a mask."""

    def __init__(self, function) -> None:
        super().__init__()
        self.function, self.head = function, nn.Linear(8, 8)

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        return self.head(x), self.function(mask)


def call(dtype: torch.dtype = torch.int64, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    mask = torch.randint(0, 4, (2, 8), generator=generator)
    return torch.randn(2, 8, generator=generator), mask.to(dtype)


@settings(deadline=None, max_examples=40, suppress_health_check=list(HealthCheck))
@given(
    name=st.sampled_from(sorted(FUNCTIONS)),
    dtype=st.sampled_from([torch.int64, torch.int32, torch.uint8, torch.int8]),
)
def test_promote_integers_when_functions_are_drawn_then_results_stay(name, dtype):
    model, args = Masked(FUNCTIONS[name]).eval(), call(dtype)
    gm = torch.export.export(model, args).module(check_guards=False)
    promote_integers(gm)
    for found, wanted in zip(gm(*args), model(*args), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)
    assert not promote_integers(gm).changed


def test_promote_integers_when_a_condition_is_read_then_it_stays():
    model = Masked(lambda m: torch.where(m > 1, 0.5, m))
    gm = torch.export.export(model, call()).module(check_guards=False)
    promote_integers(gm)
    (where,) = (n for n in gm.graph.nodes if "where" in str(n.target))
    assert where.args[0].meta["val"].dtype is torch.bool


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_artifact_when_integers_become_reals_then_it_gives_torchs(name, backend):
    pytest.importorskip({"onnx": "onnxruntime", "xnnpack": "executorch", "cpu": "torch"}[backend])
    torch.manual_seed(0)
    model, args = Masked(FUNCTIONS[name]).eval(), call()
    artifact = pq.quantize(
        model, args, calibration_data=[args], backend=backend, progress=False, allow_slower=True
    )
    for seed in (0, 1):
        _, found = artifact.run(*call(seed=seed))
        wanted = model(*call(seed=seed))[1]
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
