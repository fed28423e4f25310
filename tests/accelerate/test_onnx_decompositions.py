"""Lowering to ONNX without a decomposition where there is nothing to decompose: the same files."""

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

import pt2e_quant as pq
from pt2e_quant.accelerate.onnx_decompositions import PATCH
from pt2e_quant.accelerate.patch import VARIABLE
from tests.digests.digest_artifact import digest_program, digest_results
from tests.mixture_of_experts import Mixture

pytestmark = pytest.mark.skipif(not PATCH.is_on(), reason="other versions: nothing is replaced")
ONNX = pq.backends.get("onnx").allowing_slower()


class Convs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 8, 3), nn.Linear(72, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.conv(x)).flatten(1))


class Heads(nn.Module):
    """Reshapes that need a copy and such that do not, copies, and results that are either."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (t.reshape(2, -1, 4, 4).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        y = (q @ k.transpose(-1, -2)).softmax(-1) @ v
        return y.transpose(1, 2).reshape(2, -1, 16), y.transpose(1, 2).contiguous(), q.flatten(2)


class Casts(nn.Module):
    """A cast is a composite that may be a view: torch's own decomposition writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x) * (x > 0).to(torch.float32)


TOKENS = Dim("tokens", max=30)
CASES = {
    "convolutions": (Convs(), (2, 3, 5, 5), None, "int8", True),
    "heads": (Heads(), (2, 9, 16), None, "int8_dynamic", True),
    "experts": (Mixture("turned"), (1, 9, 32), ({1: TOKENS},), "int8", True),
    "casts": (Casts(), (2, 8), None, "int8", False),
}


@pytest.mark.parametrize("name", CASES)
def test_without_idle_decompositions_when_switched_off_then_the_same_file(name, monkeypatch):
    model, sizes, shapes, recipe, is_skipped = CASES[name]
    x = torch.randn(sizes, generator=torch.Generator().manual_seed(0))
    program = torch.export.export(model.eval(), (x,), dynamic_shapes=shapes)
    prepared = pq.prepare_pt2e(program, ONNX.quantizer(recipe), effort="fast")
    canonical = pq.convert_pt2e(pq.calibrate(prepared, [x], progress=False))
    calls = []
    decompose = ExportedProgram.run_decompositions

    def counted(*args, **kwargs):
        calls.append(args)
        return decompose(*args, **kwargs)

    monkeypatch.setattr(ExportedProgram, "run_decompositions", counted)
    on = ONNX.lower(canonical, verify=False)
    assert not calls if is_skipped else len(calls) == 1
    monkeypatch.setenv(VARIABLE, PATCH.name)
    calls.clear()
    off = ONNX.lower(canonical, verify=False)
    assert len(calls) == 1
    assert digest_program(on) == digest_program(off)
    assert digest_results(on.run(x)) == digest_results(off.run(x))
