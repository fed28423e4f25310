"""Models that pad and mask with infinities, or with numbers that stand for them."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

pytest.importorskip("executorch", reason="the extra xnnpack is not installed")
pytest.importorskip("onnxruntime", reason="the extra onnx is not installed")

import pt2e_quant as pq
from pt2e_quant.flow.calibrate.sample import sqnr_db

INF = float("inf")
WRITTEN: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "padded": lambda h, _: F.max_pool2d(F.pad(h, (0, 1, 0, 1), value=-INF), 3, 2),
    "padded_by_a_number": lambda h, _: F.max_pool2d(F.pad(h, (0, 1, 0, 1), value=-1e9), 3, 2),
    "filled": lambda h, mask: h.masked_fill(mask, -INF).amax(-1, keepdim=True),
    "filled_by_a_number": lambda h, mask: h.masked_fill(mask, -1e9).amax(-1, keepdim=True),
    "added": lambda h, mask: (h - mask.float() * 1e9).amax(-1, keepdim=True),
    "chosen": lambda h, mask: torch.where(mask, torch.full_like(h, INF), h).amin(-1, keepdim=True),
}


class Masked(nn.Module):
    """A function of a convolution's result and a mask, between convolutions."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.first, self.last = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 1)

    def forward(self, image: Tensor, mask: Tensor) -> Tensor:
        made: Tensor = self.last(self.function(self.first(image), mask))
        return made


@pytest.mark.parametrize("backend", ["xnnpack", "onnx"])
@pytest.mark.parametrize("name", WRITTEN)
def test_infinity_when_padded_or_masked_with_then_the_range_is_of_the_values_beside_it(
    name: str, backend: str
) -> None:
    torch.manual_seed(0)
    model = Masked(WRITTEN[name]).eval()
    mask = torch.arange(12) > 8
    batches = [(torch.randn(2, 3, 12, 12), mask) for _ in range(4)]
    chosen = pq.backends.get("onnx").allowing_slower() if backend == "onnx" else backend
    artifact = pq.quantize(
        model, batches[0], calibration_data=batches[:3], backend=chosen, progress=False
    )
    assert (
        sqnr_db(model(*batches[3]), artifact.run(*batches[3])) > 20
    )  # below 5 where a range is poisoned
