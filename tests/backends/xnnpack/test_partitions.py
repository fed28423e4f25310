"""What keeps a language model in few partitions: the passes, and a step with a cache."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule

from pt2e_quant.backends.xnnpack.artifact import XnnpackArtifact
from pt2e_quant.backends.xnnpack.backend import BACKEND
from pt2e_quant.backends.xnnpack.passes.as_convs_and_products import (
    group_heads,
    means_as_products,
    selections_as_products,
)
from pt2e_quant.backends.xnnpack.passes.edge_forms import gather_shared_inputs
from pt2e_quant.backends.xnnpack.passes.refloat import choose_per_row, split_biases
from pt2e_quant.flow.calibrate.sample import sqnr_db
from pt2e_quant.flow.convert.convert_pt2e import convert_pt2e
from pt2e_quant.flow.prepare.prepare_pt2e import prepare_pt2e
from pt2e_quant.graph.pipeline import GraphPass, PassResult
from pt2e_quant.passes.cleanup.strip_guards import strip_guards
from pt2e_quant.passes.qdq.duplicate_dequantize import duplicate_dequantize

LENGTH = torch.export.Dim("length", min=1, max=16)


def captured(model: nn.Module, *inputs: Tensor, dim: int | None = 1) -> GraphModule:
    shapes = None if dim is None else tuple({dim: LENGTH} for _ in inputs)
    gm = torch.export.export(model.eval(), inputs, dynamic_shapes=shapes).module()
    strip_guards(gm)
    return gm


def applied(gm: GraphModule, entry: GraphPass, *inputs: Tensor, exact: bool = False) -> PassResult:
    """Run a pass; values stay the same and a second run changes nothing."""
    with torch.no_grad():
        before = gm(*inputs)
        result = entry(gm)
        bound = {"rtol": 0, "atol": 0} if exact else {}
        torch.testing.assert_close(gm(*inputs), before, **bound)
    assert not entry(gm).changed
    return result


def targets(gm: GraphModule) -> list[str]:
    return [str(n.target) for n in gm.graph.nodes if n.op == "call_function"]


class Body(nn.Module):
    def __init__(self, body) -> None:  # type: ignore[no-untyped-def]
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


class RmsNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(1 + 0.1 * torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def rotated(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat([-x[..., half:], x[..., :half]], -1)


def repeated(x: Tensor, count: int) -> Tensor:
    batch, heads, length, width = x.shape
    wide = x[:, :, None].expand(batch, heads, count, length, width)
    return wide.reshape(batch, heads * count, length, width)


def test_mean_when_over_the_last_axis_then_a_product():  # type: ignore[no-untyped-def]
    gm = captured(RmsNorm(24), torch.randn(2, 5, 24))
    assert applied(gm, means_as_products, torch.randn(2, 9, 24)).changed
    assert "aten.linear.default" in targets(gm)
    assert "aten.mean.dim" not in targets(gm)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (lambda x: x.mean(-1), "drops it"),
        (lambda x: x.mean(1, keepdim=True), "not over the last axis"),
        (lambda x: x.double().mean(-1, keepdim=True), "not of float32"),
        (lambda x: x.mT.mean(-1, keepdim=True), "known only at run time"),
    ],
)
def test_mean_when_it_is_another_then_kept(body, reason):  # type: ignore[no-untyped-def]
    gm = captured(Body(body), torch.randn(2, 5, 24))
    result = means_as_products(gm)
    assert not result.changed
    assert [n for n in result.notes if n.skipped and reason in n.text]


def paired(x):  # type: ignore[no-untyped-def]
    return torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)


@pytest.mark.parametrize("dim", [None, 1])
@pytest.mark.parametrize(
    "body", [paired, lambda x: torch.cat([x[..., :4], x[..., ::2]], -1)], ids=["pairs", "cat"]
)
def test_selection_when_it_has_a_step_then_a_product_equal_to_the_bit(body, dim):  # type: ignore[no-untyped-def]
    gm = captured(Body(body), torch.randn(2, 5, 24), dim=dim)
    size = 5 if dim is None else 9
    assert applied(gm, selections_as_products, torch.randn(2, size, 24), exact=True).changed
    assert targets(gm) == ["aten.linear.default"]


@pytest.mark.parametrize(
    ("body", "dim"),
    [
        (rotated, None),  # without a step: the delegate slices
        (rotated, 1),
        (lambda x: torch.cat([x, x], -1), 1),
        (lambda x: torch.stack([x[..., 1::2], x[..., ::2]], -2).flatten(-2), 1),
        (lambda x: torch.stack([x[..., 1::2], x[..., ::2]], -1).flatten(0, 1), 1),
        (lambda x: torch.cat([x[..., :4], (x + 1)[..., :4]], -1), 1),
        (lambda x: torch.cat([x, x], 0), 1),
    ],
)
def test_selection_when_it_is_no_plain_one_then_kept(body, dim):  # type: ignore[no-untyped-def]
    gm = captured(Body(body), torch.randn(2, 5, 24), dim=dim)
    assert not selections_as_products(gm).changed


@pytest.mark.parametrize("count", [2, 3])
def test_heads_when_they_share_keys_then_nothing_is_repeated(count):  # type: ignore[no-untyped-def]
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("k", torch.randn(1, 2, 7, 8))
            self.register_buffer("v", torch.randn(1, 2, 7, 8))

        def forward(self, q: Tensor) -> Tensor:
            scores = q @ repeated(self.k, count).transpose(-2, -1)
            return scores.softmax(-1) @ repeated(self.v, count)

    gm = captured(Shared(), torch.randn(1, 2 * count, 5, 8), dim=2)
    assert applied(gm, group_heads, torch.randn(1, 2 * count, 9, 8)).changed
    assert "aten.expand.default" not in targets(gm)
    assert targets(gm).count("aten.bmm.default") == 2


@pytest.mark.parametrize("shape", [(1, 1, 5, 8), (3, 4, 5, 8)])
def test_heads_when_the_left_side_has_other_heads_or_samples_then_kept(shape):  # type: ignore[no-untyped-def]
    k = torch.randn(1, 2, 7, 8)
    model = Body(lambda x: x @ repeated(k, 2).transpose(-2, -1))
    assert not group_heads(captured(model, torch.randn(shape), dim=None)).changed


def test_heads_when_none_is_shared_then_kept():  # type: ignore[no-untyped-def]
    gm = captured(Body(lambda x: x @ x.mT), torch.randn(1, 4, 5, 8), dim=None)
    assert not group_heads(gm).changed


class Gated(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.gate(x)) * self.up(x)


class Repeated(nn.Module):
    """Layers that share their weights, as ALBERT's."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Gated()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.layer(x) + x)


def converted(recipe: str, model: type[nn.Module] = Gated) -> GraphModule:
    torch.manual_seed(0)
    program = torch.export.export(model().eval(), (torch.randn(2, 32),))
    gm = convert_pt2e(prepare_pt2e(program, BACKEND.quantizer(recipe)))
    duplicate_dequantize(gm)
    return gm


def test_linears_when_they_share_an_input_then_next_to_each_other():  # type: ignore[no-untyped-def]
    gm = converted("int8_dynamic")
    assert applied(gm, gather_shared_inputs, torch.randn(2, 32), exact=True).changed
    gm.graph.lint()
    order = targets(gm)
    first = order.index("aten.linear.default")
    assert order.index("aten.sigmoid.default") > order.index("aten.linear.default", first + 1)


def test_linears_when_layers_share_weights_then_each_weight_stands_before_its_readers():  # type: ignore[no-untyped-def]
    gm = converted("int8_dynamic", Repeated)
    assert applied(gm, gather_shared_inputs, torch.randn(2, 32), exact=True).changed
    gm.graph.lint()


def test_bias_when_weights_alone_are_integers_then_behind_the_linear():  # type: ignore[no-untyped-def]
    gm = converted("w8")
    assert applied(gm, split_biases, torch.randn(2, 32)).changed
    assert targets(gm).count("aten.add.Tensor") == 2
    assert not split_biases(converted("int8_dynamic")).changed


def test_rows_when_per_token_already_then_kept():  # type: ignore[no-untyped-def]
    assert not choose_per_row(converted("int8_dynamic")).changed


class CachedBlock(nn.Module):
    """One attention block with rotary positions, shared key heads and a cache in buffers."""

    def __init__(self, width: int = 64, heads: int = 4, shared: int = 2, context: int = 16) -> None:
        super().__init__()
        self.heads, self.shared, self.size = heads, shared, width // heads
        self.table = nn.Embedding(40, width)
        self.norm, self.norm2, self.last = RmsNorm(width), RmsNorm(width), RmsNorm(width)
        narrow = shared * self.size
        self.q, self.k, self.v, self.o = (
            nn.Linear(*sizes, bias=False)
            for sizes in ((width, width), (width, narrow), (width, narrow), (width, width))
        )
        self.mlp, self.down = Gated(width), nn.Linear(width, width, bias=False)
        self.head = nn.Linear(width, 40, bias=False)
        self.head.weight = self.table.weight
        turns = torch.arange(context)[:, None] / 100 ** (torch.arange(self.size // 2) / 8)
        self.register_buffer("turns", torch.cat([turns, turns], -1))
        for name in ("keys", "values"):
            self.register_buffer(name, torch.zeros(1, shared, context, self.size))

    def turned(self, x: Tensor, positions: Tensor) -> Tensor:
        angles = self.turns[positions]
        return x * angles.cos() + rotated(x) * angles.sin()

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        x = self.table(ids)
        y = self.norm(x)
        length = ids.shape[1]
        q, k, v = (
            part(y).view(1, length, -1, self.size).transpose(1, 2)
            for part in (self.q, self.k, self.v)
        )
        keys = self.keys.index_copy_(2, positions, self.turned(k, positions))
        values = self.values.index_copy_(2, positions, v)
        seen = torch.arange(keys.shape[2])[None] <= positions[:, None]
        count = self.heads // self.shared
        z = F.scaled_dot_product_attention(
            self.turned(q, positions), repeated(keys, count), repeated(values, count), seen
        )
        x = x + self.o(z.transpose(1, 2).reshape(1, length, -1))
        x = x + self.down(self.mlp(self.norm2(x)))
        return self.head(self.last(x))


@pytest.mark.parametrize(
    "recipe",
    ["int8_dynamic", *(pytest.param(name, marks=pytest.mark.slow) for name in ("a8w4_g32", "w8"))],
)
def test_cache_when_run_token_by_token_then_as_the_graph_in_two_partitions(recipe):  # type: ignore[no-untyped-def]
    torch.manual_seed(0)
    model = CachedBlock()
    ids, positions = torch.randint(0, 40, (1, 8)), torch.arange(8)
    program = torch.export.export(
        model.eval(), (ids, positions), dynamic_shapes=({1: LENGTH}, {0: LENGTH})
    )
    canonical = convert_pt2e(prepare_pt2e(program, BACKEND.quantizer(recipe)))
    artifact = BACKEND.lower(canonical, (ids, positions))
    assert isinstance(artifact, XnnpackArtifact)
    contents = artifact.contents()
    # Up to the writes of the cache, and behind them.
    assert len(contents.delegates) == 2
    assert contents.kernels["aten.index_put_"] == 2
    assert contents.kernels["aten.expand_copy"] == contents.kernels["aten.mean"] == 0

    artifact.reset()
    with torch.no_grad():
        whole = canonical(ids, positions)
        canonical.keys.zero_()
        canonical.values.zero_()
        for i in range(8):
            arguments = ids[:, i : i + 1], positions[i : i + 1]
            expected, found = canonical(*arguments), artifact.run(*arguments)
            assert sqnr_db(expected, found) > 30
            assert sqnr_db(whole[:, i : i + 1], found) > 30


def test_unsqueeze_when_two_sizes_are_dynamic_then_outside_of_the_delegate():  # type: ignore[no-untyped-def]
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            y = self.up(x)
            return (y.unsqueeze(-1) * torch.sigmoid(y).unsqueeze(-1)).squeeze(-1)

    torch.manual_seed(0)
    sizes = {0: torch.export.Dim("batch", max=4), 1: LENGTH}
    program = torch.export.export(Outer(), (torch.randn(2, 5, 16),), dynamic_shapes=(sizes,))
    canonical = convert_pt2e(prepare_pt2e(program, BACKEND.quantizer("int8_dynamic")))
    artifact = BACKEND.lower(canonical)
    assert artifact.contents().kernels == {"aten.unsqueeze_copy": 2, "aten.squeeze_copy": 1}
    for shape in ((1, 1, 16), (4, 16, 16)):
        x = torch.randn(shape)
        assert sqnr_db(canonical(x), artifact.run(x)) > 100


@pytest.mark.parametrize("slopes", [1, 16])
@pytest.mark.parametrize("shape", [(3, 16), (2, 16, 5), (1, 16, 4, 4)])
def test_prelu_when_not_of_images_then_outside_of_the_delegate(shape, slopes):  # type: ignore[no-untyped-def]
    class Slopes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.prelu = nn.Linear(shape[-1], shape[-1]), nn.PReLU(slopes)
            self.prelu.weight.data = torch.linspace(0.1, 0.9, slopes)

        def forward(self, x: Tensor) -> Tensor:
            return self.prelu(self.up(x))

    torch.manual_seed(0)
    program = torch.export.export(Slopes().eval(), (torch.randn(shape),))
    canonical = convert_pt2e(prepare_pt2e(program, BACKEND.quantizer("int8_dynamic")))
    artifact = BACKEND.lower(canonical)
    x = torch.randn(shape)
    assert sqnr_db(canonical(x), artifact.run(x)) > 100
    is_image = len(shape) == 4
    assert ("PReLU" in artifact.report.float_ops) == is_image
    assert artifact.contents().kernels == ({} if is_image else {"aten.gt": 1, "aten.where": 1})


class RunTimeSlopes(nn.Module):
    """A prelu whose slopes are computed, which is written with operators of other layouts."""

    def __init__(self, *, is_written: bool) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.is_written = is_written
        self.register_buffer("slopes", torch.linspace(0.1, 0.9, 4))

    def forward(self, x: Tensor) -> Tensor:
        y = F.prelu(
            self.conv(x), self.slopes if self.is_written else x.mean((0, 2, 3)).repeat(2)[:4]
        )
        if self.is_written:
            self.slopes.mul_(0.5)
        return y


@pytest.mark.parametrize("is_written", [True, False])
def test_prelu_when_its_slopes_are_no_constant_then_right_in_every_call(is_written, quantize_with):
    x = torch.randn(2, 3, 8, 8)
    canonical = quantize_with(RunTimeSlopes(is_written=is_written), (x,), BACKEND.quantizer())
    artifact = BACKEND.lower(canonical)
    for _ in range(2):
        assert sqnr_db(canonical(x), artifact.run(x)) > 60
