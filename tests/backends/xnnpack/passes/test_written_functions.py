"""Functions without a kernel in ExecuTorch: written out, or refused by their line."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pt2e_quant as pq
from pt2e_quant.core.errors import UnsupportedError

ROWS, COLUMNS = 6, 9
TABLE = torch.linspace(-1, 1, 12).view(3, 4)
BATCH = torch.export.Dim("batch", min=1, max=16)


class Behind(nn.Module):
    """Functions of what a linear gives, each as a result of its own."""

    def __init__(self, *functions) -> None:  # type: ignore[no-untyped-def]
        super().__init__()
        self.linear = nn.Linear(COLUMNS, COLUMNS)
        self.functions = functions

    def forward(self, x: Tensor) -> list[Tensor]:
        h = self.linear(x)
        return [function(h) for function in self.functions]


def _lowered(*functions):  # type: ignore[no-untyped-def]
    torch.manual_seed(0)
    data = [(torch.randn(ROWS, COLUMNS),) for _ in range(2)]
    return pq.quantize(
        Behind(*functions).eval(),
        data[0],
        dynamic_shapes={"x": {0: BATCH}},
        calibration_data=data,
        backend="xnnpack",
        progress=False,
    )


def _matrices(h: Tensor) -> Tensor:
    """[rows, 3, 3], far from ones without an inverse."""
    return h.unflatten(-1, (3, 3)).tanh() + 4.0 * torch.eye(3)


def _volumes(h: Tensor) -> Tensor:
    """[rows, 1, 3, 3, 3], with values that stand at several places."""
    return torch.stack([h, h, 2 * h.round()], 1).view(-1, 1, 3, 3, 3)


WRITTEN = {
    "unary": [
        torch.angle,
        torch.erfc,
        torch.exp2,
        torch.i0,
        torch.signbit,
        torch.special.i0e,
        torch.special.i1,
        torch.special.i1e,
        torch.special.log_ndtr,
        F.rrelu,
        lambda h: torch.digamma(h.abs() + 0.1),
        lambda h: torch.lgamma(h.abs() + 0.1),
        lambda h: torch.erfinv(h.tanh() * 0.9),
        lambda h: torch.round(h, decimals=1),
        lambda h: torch.special.ndtri(h.sigmoid()),
    ],
    "matrices": [
        lambda h: torch.linalg.inv(_matrices(h)),
        lambda h: torch.linalg.det(_matrices(h)),
        lambda h: torch.linalg.cholesky(_matrices(h) @ _matrices(h).mT),
    ],
    "products and losses": [
        lambda h: torch.addmv(h[:, 0], h, h[0], beta=0.5),
        lambda h: torch.addbmm(TABLE[0, 0], h.unsqueeze(-1), h.unsqueeze(-2), alpha=2),
        lambda h: F.hinge_embedding_loss(h, h.sign()),
        lambda h: F.cosine_embedding_loss(h, h.roll(1, -1), h[:, 0].sign()),
        lambda h: F.pdist(h.mT),
        lambda h: F.max_pool3d(_volumes(h), 2, 1, 1, return_indices=True)[1],
    ],
    "binary": [
        lambda h: torch.copysign(h, h.roll(1, -1)),
        lambda h: torch.fmax(h, h.roll(1, -1)),
        lambda h: torch.fmin(h, h.roll(1, -1)),
        lambda h: torch.hypot(h, h.roll(1, -1)),
        lambda h: torch.ldexp(h, h.roll(1, -1)),
        lambda h: torch.logaddexp2(h, h.roll(1, -1)),
        lambda h: torch.dist(h, h.roll(1, -1)),
        lambda h: F.bilinear(h, h.roll(1, -1), torch.ones(2, COLUMNS, COLUMNS).tril()),
    ],
    "reductions": [
        lambda h: h.cummax(-1)[0],
        lambda h: h.cummin(-1)[0],
        lambda h: h.cumprod(-1),
        lambda h: h.kthvalue(2, -1)[0],
        lambda h: h.logcumsumexp(-1),
        lambda h: h.median(-1)[0],
        lambda h: h.round().mode(-1)[0],
        lambda h: h.quantile(0.3, -1),
        lambda h: h.sort(-1)[0],
    ],
    "of the batch": [
        lambda h: h.cummax(0)[0],
        lambda h: h.cummin(0)[1],
        lambda h: h.cumprod(0),
        lambda h: h.logcumsumexp(0),
        lambda h: h.median(0)[0],
        lambda h: h.sort(0)[0],
    ],
    "float64": [lambda h: h.double().log_softmax(-1), lambda h: h.double().log_softmax(0)],
    "places": [
        lambda h: torch.bucketize(h, torch.tensor([-1.0, 0.0, 1.0])),
        lambda h: torch.searchsorted(torch.tensor([-1.0, 0.0, 1.0]), h, right=True),
        lambda h: F.adaptive_max_pool2d(h.reshape(-1, 1, 3, 3), 2),
        lambda h: F.embedding_bag(h.abs().int().clamp(max=2), TABLE, mode="mean", padding_idx=1),
        lambda h: F.embedding_bag(
            h.abs().int().clamp(max=2), TABLE, mode="sum", per_sample_weights=h
        ),
    ],
}


@pytest.mark.parametrize("kind", WRITTEN)
def test_functions_when_executorch_has_no_kernel_then_written_out(kind):
    artifact = _lowered(*WRITTEN[kind])
    assert artifact.report.sqnr_canonical_db > 40


@pytest.mark.parametrize(
    ("function", "operator"),
    [
        (torch.special.airy_ai, "special_airy_ai"),
        (lambda h: torch.nextafter(h, h + 1), "nextafter"),
        (lambda h: torch.frexp(h)[0], "frexp"),
        (lambda h: torch.gcd(h.int(), h.int() + 2), "gcd"),
    ],
)
def test_function_when_it_is_not_written_then_refused_by_its_line(function, operator):
    with pytest.raises(UnsupportedError, match="no kernel") as caught:
        _lowered(function)
    assert operator in str(caught.value)
    assert "test_written_functions.py" in str(caught.value)
    assert caught.value.node_name
    assert caught.value.fix


def test_layer_norm_when_its_mean_is_large_then_centered_before_it_is_squared():
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm([6, 6]), nn.Conv2d(8, 8, 3)).eval()
    data = [torch.randn(2, 8, 6, 6) * 0.05 + 300.0 for _ in range(4)]
    artifact = pq.quantize(
        model, (data[0],), calibration_data=data, backend="xnnpack", progress=False
    )
    assert pq.sqnr_db(model(data[1]), artifact.run(data[1])) > 30


def test_sort_when_values_are_equal_then_in_their_order():
    along = {"rows": {"dim": 0, "descending": True}, "columns": {"dim": -1}}
    artifact = _lowered(
        lambda h: h,
        lambda h: torch.argsort((h > 0).int(), stable=True, **along["columns"]),
        lambda h: h.relu().sort(stable=True, **along["rows"])[1],
    )
    for rows in (1, ROWS, 16):
        h, columns, places = artifact.run(torch.randn(rows, COLUMNS))
        assert torch.equal(columns, torch.argsort((h > 0).int(), stable=True, **along["columns"]))
        assert torch.equal(places, h.relu().sort(stable=True, **along["rows"])[1])
