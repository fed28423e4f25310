"""Models and the road to a canonical graph, one thread, seeded."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from pt2e_quant.backends.cpu.backend import BACKEND
from pt2e_quant.flow.calibrate.calibrate import calibrate
from pt2e_quant.flow.convert.convert_pt2e import convert_pt2e
from pt2e_quant.flow.prepare.prepare_pt2e import prepare_pt2e


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def make_noise():
    return noise


@pytest.fixture
def quantize_with():
    def quantized(
        model: nn.Module,
        inputs: tuple[Any, ...],
        quantizer: Any = None,
        *,
        dynamic_shapes: Any = None,
        data: Sequence[tuple[Any, ...]] | None = None,
    ) -> GraphModule:
        ep = torch.export.export(model.eval(), inputs, dynamic_shapes=dynamic_shapes)
        prepared = prepare_pt2e(ep, quantizer or BACKEND.quantizer())
        calibrate(prepared, data or [inputs], progress=False)
        return convert_pt2e(prepared)

    return quantized
