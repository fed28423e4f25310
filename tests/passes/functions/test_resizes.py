"""Bicubic resizes and means of windows, as products and convolutions: as ATen has them."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from pt2e_quant.graph.pipeline import run_passes
from pt2e_quant.passes.functions.resizes import (
    adaptive_avg_pool,
    bicubic,
    bicubic_between_pixels,
)
from pt2e_quant.passes.functions.write_functions import write_functions
from tests.call_function import Call

sizes = st.integers(1, 23)


def image(height, width):
    return torch.randn(2, 3, height, width, generator=torch.Generator().manual_seed(0))


@given(sizes, sizes, sizes, sizes, st.booleans())
def test_bicubic_when_to_a_size_then_as_aten(height, width, rows, columns, align_corners):
    x, ends = image(height, width), (rows, columns)
    expected = F.interpolate(x, ends, mode="bicubic", align_corners=align_corners)
    torch.testing.assert_close(bicubic(x, ends, align_corners), expected, rtol=1e-5, atol=1e-5)


@given(sizes, sizes, st.floats(0.3, 4.0), st.floats(0.3, 4.0))
def test_bicubic_when_by_factors_then_as_aten(height, width, rows, columns):
    x, factors = image(height + 3, width + 3), (rows, columns)
    expected = F.interpolate(x, scale_factor=factors, mode="bicubic")
    found = bicubic(x, None, False, factors)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@given(sizes, sizes, st.integers(2, 8), st.booleans())
def test_bicubic_between_pixels_when_by_a_whole_factor_then_as_aten(height, width, factor, by_size):
    x = image(height, width)
    ends, factors = (
        ((height * factor, width * factor), None) if by_size else (None, (float(factor),) * 2)
    )
    expected = F.interpolate(x, ends, factors, mode="bicubic")
    found = bicubic_between_pixels(x, ends, False, factors)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_bicubic_between_pixels_when_the_factors_differ_then_refused():
    for ends, corners in (((8, 12), False), ((8, 8), True), ((6, 6), False)):
        with pytest.raises(NotImplementedError, match="depend on the place"):
            bicubic_between_pixels(image(4, 4), ends, corners)


@given(st.lists(sizes, min_size=3, max_size=3), st.lists(sizes, min_size=3, max_size=3))
def test_adaptive_pool_of_volumes_when_written_then_as_aten(shape, counts):
    if counts == [1, 1, 1]:
        counts = [2, 1, 1]
    x = torch.randn(1, 2, *shape)
    expected = F.adaptive_avg_pool3d(x, counts)
    torch.testing.assert_close(adaptive_avg_pool(x, counts), expected, rtol=1e-5, atol=1e-5)


def test_adaptive_pool_when_it_has_no_windows_then_empty():
    x = torch.randn(2, 3, 4, 5)
    assert adaptive_avg_pool(x, (0, 4)).shape == F.adaptive_avg_pool2d(x, (0, 4)).shape


@pytest.mark.parametrize(
    ("function", "products"),
    [
        (lambda x: F.interpolate(x, scale_factor=2, mode="bicubic"), 2),
        (lambda x: F.interpolate(x, (9, 5), mode="bicubic", antialias=True), 2),
        (lambda x: F.adaptive_avg_pool2d(x, (3, 5)), 2),
        (lambda x: F.adaptive_avg_pool1d(x.flatten(1, 2), 3), 1),
    ],
    ids=["bicubic", "antialiased", "uneven pool", "uneven pool of rows"],
)
def test_resize_when_sizes_are_known_then_products_with_constants(function, products):
    x = image(8, 7)
    gm = torch.export.export(Call(function), (x,)).module()
    expected = gm(x)
    run_passes(gm, (write_functions([]),))
    calls = [n.target for n in gm.graph.nodes if n.op == "call_function"]
    assert calls.count(torch.ops.aten.matmul.default) == products
    moves = {"flatten", "unflatten", "view", "numpy_T", "mT", "reshape", "matmul"}
    assert {str(t).split(".")[1] for t in calls} <= moves
    torch.testing.assert_close(gm(x), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("function", "size"),
    [
        (lambda x: F.adaptive_avg_pool2d(x, (4, 7)), (8, 7)),
        (lambda x: F.adaptive_avg_pool2d(x, 1), (8, 7)),
        (lambda x: F.interpolate(x, (1500, 1500), mode="bicubic"), (800, 700)),
    ],
    ids=["even windows", "mean", "large matrices"],
)
def test_resize_when_a_runtime_takes_it_then_left(function, size):
    x = torch.zeros(1, 1, *size)
    gm = torch.export.export(Call(function), (x,)).module()
    assert not run_passes(gm, (write_functions([]),))[0].changed
