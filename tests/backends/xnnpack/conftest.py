"""Lowering helpers; the whole folder is skipped where ExecuTorch is missing."""

import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from pt2e_quant.backends.xnnpack.passes.simplify import numbers_as_constants, simplify_for_table
from pt2e_quant.backends.xnnpack.recipes import INT8
from pt2e_quant.backends.xnnpack.table import TABLE
from pt2e_quant.flow.annotate.table_quantizer import TableQuantizer
from pt2e_quant.flow.calibrate.calibrate import calibrate
from pt2e_quant.flow.convert.convert_pt2e import convert_pt2e
from pt2e_quant.flow.prepare.prepare_pt2e import prepare_pt2e
from pt2e_quant.passes.cleanup.join_and_split import split_as_slices
from pt2e_quant.passes.cleanup.linear_forms import products_as_linears

collect_ignore_glob = [] if importlib.util.find_spec("executorch") else ["test_*.py"]

BATCHES = torch.export.Dim("batch", min=1, max=64)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


def noise(shape: Sequence[int], seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def make_noise() -> Callable[..., Tensor]:
    return noise


@pytest.fixture
def every_row() -> Callable[[], TableQuantizer]:
    """A quantizer that quantizes light operators wherever they stand."""

    def made() -> TableQuantizer:
        transforms = (
            split_as_slices,
            products_as_linears,
            simplify_for_table,
            numbers_as_constants,
        )
        return TableQuantizer(TABLE, INT8, transforms=transforms)

    return made


@pytest.fixture
def quantize_with() -> Callable[..., GraphModule]:
    def quantized(
        model: nn.Module,
        inputs: tuple[Any, ...],
        quantizer: Any,
        *,
        dynamic: bool = False,
        data: Sequence[tuple[Any, ...]] | None = None,
    ) -> GraphModule:
        shapes = tuple({0: BATCHES} for _ in inputs) if dynamic else None
        shapes = (shapes,) if dynamic and getattr(model, "takes_star", False) else shapes
        ep = torch.export.export(model.eval(), inputs, dynamic_shapes=shapes)
        prepared = prepare_pt2e(ep, quantizer)
        calibrate(prepared, data or [inputs], progress=False)
        return convert_pt2e(prepared)

    return quantized
