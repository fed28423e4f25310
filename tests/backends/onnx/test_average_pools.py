"""Average pools of all options between convolutions in integers."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("onnxruntime", reason="the extra onnx is not installed")

import pt2e_quant as pq
from pt2e_quant.core.errors import UnsupportedError

CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
POOLS = (nn.functional.avg_pool1d, nn.functional.avg_pool2d, nn.functional.avg_pool3d)


class Pools(nn.Module):
    """Several pools of one convolution's result, each read by a convolution in integers."""

    def __init__(self, rank: int, options: list[dict[str, Any]]) -> None:
        super().__init__()
        self.pool, self.options = POOLS[rank - 1], options
        self.first, self.last = CONVS[rank - 1](3, 8, 3), CONVS[rank - 1](8, 4, 1)

    def forward(self, image: Tensor) -> list[Tensor]:
        h = self.first(image)
        return [self.last(self.pool(h, 3, 2, **options)) for options in self.options]


def check(model: nn.Module, image: Tensor, dynamic: Any = None) -> Any:
    """The artifact, which the gate has held against its graph, each result alone."""
    torch.manual_seed(0)
    return pq.quantize(
        model.eval(),
        (image,),
        calibration_data=[(image,)],
        dynamic_shapes=dynamic,
        backend=pq.backends.get("onnx").allowing_slower(),  # as integer pools are
        recipe="int8",
        progress=False,
    )


@pytest.mark.parametrize("size", [9, 10])
@pytest.mark.parametrize("rank", [1, 2])
def test_pool_when_ceil_mode_adds_windows_then_it_is_float_and_others_are_integers(
    rank: int, size: int
) -> None:
    every = itertools.product((False, True), (0, 1), (False, True))
    options = [
        {"ceil_mode": ceil, "padding": padding, "count_include_pad": count}
        for ceil, padding, count in every
    ]
    report = check(Pools(rank, options), torch.randn(2, 3, *[size] * rank)).report
    assert report.integer_ops["QLinearAveragePool"] == 4
    # At 9 `ceil_mode` adds no window: pools with it and without are one.
    assert report.float_ops.get("AveragePool", 0) == (4 if size == 10 else 0)


@pytest.mark.parametrize("size", [9, 10])
@pytest.mark.parametrize("rank", [2, 3])
def test_pool_when_it_has_a_divisor_then_its_sums_are_divided_by_that(rank: int, size: int) -> None:
    options = [
        {"ceil_mode": ceil, "padding": padding, "divisor_override": 5}
        for ceil, padding in itertools.product((False, True), (0, 1))
    ]
    model, image = Pools(rank, options), torch.randn(2, 3, *[size] * rank)
    artifact = check(model, image)
    assert artifact.report.float_ops["AveragePool"] == (4 if size == 10 else 2)
    for expected, found in zip(model(image), artifact.run(image), strict=True):
        assert found.shape == expected.shape
        assert (found - expected).abs().max() < 0.05 * expected.abs().max()


def test_pool_when_divisor_and_ceil_mode_meet_a_dynamic_size_then_error_says_so() -> None:
    sizes = {"image": {2: 2 * torch.export.Dim("half", min=4, max=16)}}
    model = Pools(2, [{"ceil_mode": True, "divisor_override": 5}])
    with pytest.raises(UnsupportedError, match="ceil_mode over a dynamic dimension"):
        check(model, torch.randn(2, 3, 12, 12), sizes)


class Windows(nn.Module):
    """Pools whose last window would start in the padding behind the tensor, and others."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1)

    def forward(self, image: Tensor) -> list[Tensor]:
        h = self.conv(image)
        drawn = itertools.product(((2, 1), (1, 2), (2, 2), (3, 3)), (2, 3), (False, True))
        return [
            nn.functional.avg_pool2d(h, kernel, stride, [k // 2 for k in kernel], True, counts)
            for kernel, stride, counts in drawn
        ]


@pytest.mark.parametrize("sizes", [(6, 7), (8, 9), (7, 6)], ids=str)
def test_pool_when_a_window_would_start_behind_the_tensor_then_left_out(
    sizes: tuple[int, int],
) -> None:
    image = torch.randn(1, 3, *sizes)
    model = Windows().eval()
    artifact = check(model, image)
    for expected, found in zip(model(image), artifact.run(image), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0.06)


def test_pool_when_a_dynamic_size_may_leave_a_window_out_then_error_says_so() -> None:
    class Pool(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 3, 1)

        def forward(self, image: Tensor) -> Tensor:
            return nn.functional.avg_pool2d(self.conv(image), 2, 3, 1, ceil_mode=True)

    sizes = {"image": {2: 2 * torch.export.Dim("half", min=2, max=16)}}
    with pytest.raises(UnsupportedError, match="windows that may start behind the tensor"):
        check(Pool(), torch.randn(2, 3, 12, 12), sizes)
