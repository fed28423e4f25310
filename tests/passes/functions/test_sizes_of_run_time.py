"""Windows, groups and places of run time are written out, and compute as ATen does at any size."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim

import pt2e_quant as pq
from pt2e_quant.flow.calibrate.sample import sqnr_db
from pt2e_quant.graph.pipeline import run_passes
from pt2e_quant.passes.functions.sizes_of_run_time import (
    embedding_bag,
    grouped_product,
    scatter_reduce,
)
from pt2e_quant.passes.functions.write_functions import write_functions

BATCH = Dim("batch", max=6)
SIZES = ((4, 7), (1, 12), (6, 5))


def halved(x: Tensor) -> Tensor:
    return F.adaptive_avg_pool2d(x.unsqueeze(1), (3, x.shape[1] // 2))


def of_any_width(x: Tensor) -> Tensor:
    return F.adaptive_avg_pool1d(x.unsqueeze(1), 3)


def of_volumes(x: Tensor) -> Tensor:
    volume = x[:, None, :4, None, None] * x[:, None, None, :4, None] * x[:, None, None, None, :4]
    return F.adaptive_avg_pool3d(volume, (3, 2, 1))


def filtered(x: Tensor) -> Tensor:
    """Each row of a batch through a filter of its own."""
    filters = x[:, None, :3].expand(-1, 2, 3).reshape(-1, 1, 3)
    bias = x[:, :2].reshape(-1)
    return F.conv1d(x.unsqueeze(0), filters, bias, 2, 1, groups=x.shape[0])


def filtered_images(x: Tensor) -> Tensor:
    rows = x[:, None, None, :4] * x[:, None, :4, None]
    return F.conv2d(rows.view(1, -1, 4, 4), rows[..., :2, :2] + 1, groups=x.shape[0], dilation=2)


def pooled(x: Tensor) -> Tensor:
    """Rows of a batch added to three of their columns' means."""
    places = torch.arange(x.shape[1]).remainder(3).expand_as(x)
    means = torch.ones(x.shape[0], 4).scatter_reduce(1, places, x, "mean", include_self=False)
    return means + torch.ones(x.shape[0], 4).scatter_reduce(1, places, x, "mean")


FUNCTIONS = {
    "windows": (halved, "aten.adaptive_avg_pool2d.default"),
    "any width": (of_any_width, "aten.adaptive_avg_pool1d.default"),
    "volumes": (of_volumes, "aten.adaptive_avg_pool3d.default"),
    "groups": (filtered, "aten.conv1d.default"),
    "groups of images": (filtered_images, "aten.conv2d.default"),
    "places": (pooled, "aten.scatter_reduce.two"),
}


class Behind(nn.Module):
    """A linear along the rows, and a function behind it."""

    def __init__(self, function) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 1)
        self.function = function

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, ...]:
        return self.function(self.linear(x.unsqueeze(-1)).squeeze(-1))


def exported(function):
    torch.manual_seed(0)
    sizes = ({0: BATCH, 1: Dim("width", min=5, max=12)},)
    return torch.export.export(Behind(function).eval(), (torch.randn(4, 7),), dynamic_shapes=sizes)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_function_when_written_out_then_as_aten_at_every_size(name):
    function, operator = FUNCTIONS[name]
    wanted, gm = exported(function).module(), exported(function).module(check_guards=False)
    run_passes(gm, (write_functions([]),))
    assert operator not in {str(node.target) for node in gm.graph.nodes}
    for size in SIZES:
        x = torch.randn(size)
        torch.testing.assert_close(gm(x), wanted(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("padding", [None, 3])
@pytest.mark.parametrize("has_last", [False, True])
def test_embedding_bag_when_written_out_then_as_torch(mode, padding, has_last):
    torch.manual_seed(0)
    table, indices = torch.randn(9, 4) - 2.0, torch.randint(2, 5, (11,))
    offsets = torch.tensor([0, 2, 2, 7, 11][: 4 + has_last])
    factors = torch.rand(11) if mode == "sum" else None
    wanted = F.embedding_bag(
        indices,
        table,
        offsets,
        mode=mode,
        per_sample_weights=factors,
        include_last_offset=has_last,
        padding_idx=padding,
    )
    number = ("sum", "mean", "max").index(mode)
    (found,) = embedding_bag(
        table, indices, offsets, False, number, False, factors, has_last, padding
    )
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("include_self", [False, True])
@pytest.mark.parametrize("reduce", ["sum", "mean", "amax", "amin", "prod"])
def test_scatter_reduce_when_written_with_choices_then_as_aten(reduce, include_self):
    torch.manual_seed(0)
    x, src = torch.randn(5, 3), torch.randn(9, 4)
    index = torch.randint(0, 4, (8, 3))
    found = scatter_reduce(x, 0, index, src, reduce, include_self=include_self, has_extremes=False)
    wanted = x.scatter_reduce(0, index, src, reduce, include_self=include_self)
    torch.testing.assert_close(found, wanted)


def test_functions_when_lowered_to_onnx_then_as_their_graph_at_every_size():
    pytest.importorskip("onnxruntime")
    program = exported(lambda x: tuple(function(x) for function, _ in FUNCTIONS.values()))
    prepared = pq.prepare_pt2e(program, pq.backends.get("onnx").quantizer("int8"))
    pq.calibrate(prepared, [torch.randn(4, 7)], progress=False)
    graph = pq.convert_pt2e(prepared)
    artifact = pq.backends.get("onnx").lower(graph)
    for size in SIZES:
        x = torch.randn(size)
        for wanted, found in zip(graph(x), artifact.run(x), strict=True):
            assert sqnr_db(wanted, found) > 60


def test_extremes_at_places_when_lowered_to_xnnpack_then_as_the_graph():
    pytest.importorskip("executorch")

    def extremes(x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1]).remainder(3).expand_as(x)
        least = x[:, :4].scatter_reduce(1, places, x, "amin")
        return least + x[:, :4].scatter_reduce(1, places, x, "amax", include_self=False)

    torch.manual_seed(0)
    data = [(torch.randn(4, 7),) for _ in range(3)]
    model = Behind(extremes).eval()
    artifact = pq.quantize(model, data[0], calibration_data=data, backend="xnnpack", progress=False)
    assert sqnr_db(model(*data[0]), artifact.run(*data[0])) > 30


@pytest.mark.parametrize("offs", [(2, 2, 5), (0, 4, 6), (0, 0, 0)])
def test_grouped_product_when_groups_are_empty_or_end_early_then_as_transformers_has_it(offs):
    moe = pytest.importorskip("transformers.integrations.moe")
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(6, 4, generator=generator), torch.randn(3, 4, 5, generator=generator)
    args = (x, weight, torch.tensor(offs, dtype=torch.int32))
    expected = moe.torch.ops.transformers.grouped_mm_fallback(*args)
    torch.testing.assert_close(grouped_product(*args), expected)
