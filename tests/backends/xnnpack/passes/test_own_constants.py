"""Constants that are a part of a larger tensor's memory, in a `.pte`."""

import torch
from torch import Tensor, nn

import pt2e_quant as pq
from pt2e_quant.backends.xnnpack.passes.own_constants import own_storage
from pt2e_quant.core.scheme_names import scheme_named
from pt2e_quant.graph.pipeline import run_passes

XNNPACK = pq.backends.get("xnnpack")
STACK = torch.randn(4, 32, 48, generator=torch.Generator().manual_seed(0))


class Parts(nn.Module):
    """Linears whose weights are buffers that share one tensor's memory."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(48, 48)
        self.each = nn.ModuleList(nn.Module() for _ in STACK)
        for part, weight in zip(self.each, STACK, strict=True):
            part.register_buffer("weight", weight)

    def forward(self, x: Tensor) -> list[Tensor]:
        x = self.first(x)
        return [torch.nn.functional.linear(x, part.get_buffer("weight")) for part in self.each]


def converted():
    x = torch.randn(5, 48, generator=torch.Generator().manual_seed(1))
    quantizer = XNNPACK.quantizer("w8").set_global(None)
    quantizer = quantizer.set_module_name("first", scheme_named("w8"))
    prepared = pq.prepare_pt2e(torch.export.export(Parts().eval(), (x,)), quantizer)
    return pq.convert_pt2e(pq.calibrate(prepared, [x], progress=False)), x


def test_own_storage_when_constants_share_memory_then_each_has_its_own():
    gm, x = converted()
    expected = gm(x)
    assert run_passes(gm, (own_storage,))[0].changed
    for at, held in enumerate(STACK):
        weight = gm.get_buffer(f"each.{at}.weight")
        assert weight.untyped_storage().nbytes() == weight.nbytes
        torch.testing.assert_close(weight, held, rtol=0, atol=0)
    torch.testing.assert_close(gm(x), expected, rtol=0, atol=0)
    assert not run_passes(gm, (own_storage,))[0].changed


def test_artifact_when_float_weights_share_memory_then_each_linear_has_its_own(tmp_path):
    gm, x = converted()
    artifact = XNNPACK.lower(gm)
    torch.testing.assert_close(artifact.run(x), gm(x), rtol=0, atol=1e-4)
    assert artifact.report.float_ops["FullyConnected"] >= len(STACK)
    artifact.save(tmp_path / "parts.pte")
    # Once each: the serializer would write all of the memory for each.
    assert (tmp_path / "parts.pte").stat().st_size < 2 * STACK.nbytes
