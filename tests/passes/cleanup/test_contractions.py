"""Products of a value and a constant as linears, against the products themselves."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis.strategies import booleans, data, integers, lists
from torch import nn
from torch.export import Dim

import pt2e_quant as pq
from benchmarks.measure import sqnr_db
from pt2e_quant.graph.pipeline import run_passes
from pt2e_quant.passes.cleanup import contractions
from pt2e_quant.passes.cleanup.drop_dead_constants import drop_dead_constants
from pt2e_quant.passes.cleanup.fold_constants import fold_constants
from pt2e_quant.passes.cleanup.linear_forms import einsums_as_linears, products_as_linears
from pt2e_quant.passes.cleanup.strip_guards import strip_guards

STEPS = torch.randn(2, 3, 4, 6, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def _of_any_size(monkeypatch):
    monkeypatch.setattr(contractions, "LEAST_MATRIX", 0)


class Contraction(nn.Module):
    """A product of a value and a constant of any shape."""

    def __init__(self, product, *shape):
        super().__init__()
        self.product = product
        self.w = nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(1)))

    def forward(self, x):
        return self.product(x, self.w)


CONTRACTIONS = {
    "from the left": (Contraction(lambda x, w: w @ x, 5, 4), 1),
    "from the left, a vector": (Contraction(lambda x, w: w @ x, 4), 1),
    "vector": (Contraction(lambda x, w: x @ w, 6), 1),
    "of each head": (Contraction(lambda x, w: x.unsqueeze(2) @ w, 5, 6, 3), 1),
    "of places": (Contraction(lambda x, w: x @ w, 3, 6, 5), 3),
    "of places from the left": (Contraction(lambda x, w: w @ x, 3, 5, 4), 3),
    "repeated": (Contraction(lambda x, w: x @ w.expand(3, -1, -1), 6, 5), 1),
    "repeated over one": (Contraction(lambda x, w: x[:, :1] @ w.expand(3, -1, -1), 6, 5), 1),
    "batches": (Contraction(lambda x, w: torch.bmm(x.flatten(0, 1)[:3], w), 3, 6, 5), 3),
    "batches and a sum": (
        Contraction(lambda x, w: torch.baddbmm(w[:, :1], x.flatten(0, 1)[:3], w @ w), 3, 6, 6),
        3,
    ),
    "a sum with a value": (
        Contraction(lambda x, w: torch.addmm(x[0, 0, :, :5], x[0, 0], w), 6, 5),
        1,
    ),
    "a sum from the left": (Contraction(lambda x, w: torch.addmm(x[0, 0, 0], w, x[0, 0]), 4, 4), 1),
    "two axes": (Contraction(lambda x, w: torch.tensordot(x, w, [[3, 1], [0, 2]]), 6, 5, 3), 1),
}


@pytest.mark.parametrize("name", CONTRACTIONS)
def test_product_when_of_any_constant_then_a_linear_for_each_matrix(program, name):
    model, count = CONTRACTIONS[name]
    p = program(model, (STEPS,), ({0: Dim("batch", min=1, max=8)},))
    p.apply(fold_constants, products_as_linears, drop_dead_constants)
    targets = [str(n.target) for n in p.gm.graph.nodes if n.op == "call_function"]
    assert targets.count("aten.linear.default") == count
    assert not any("mm" in t or "matmul" in t or "tensordot" in t for t in targets)
    p.matches().leaves_model_alone().is_idempotent(products_as_linears)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (Contraction(lambda x, w: x.flatten()[:6] @ w, 6, 5), "the value has no other"),
        (Contraction(lambda x, w: x[:2] @ w, 2, 3, 6, 5), "more than one axis"),
        (Contraction(lambda x, w: torch.tensordot(x, w, dims=0), 2), "no axis is summed"),
        (Contraction(lambda x, w: torch.baddbmm(x[0], x[0], w, alpha=2), 3, 6, 6), "is scaled"),
    ],
)
def test_product_when_it_is_no_linear_then_stays_with_the_reason(program, model, reason):
    gm = program(model, (STEPS,)).gm
    result = products_as_linears(gm)
    assert not result.changed
    assert reason in result.notes[0].text


@pytest.mark.parametrize(("width", "count"), [(127, 0), (128, 3)])
def test_stack_when_its_matrices_are_small_then_it_stays_one_product(
    program, monkeypatch, width, count
):
    monkeypatch.undo()
    model = Contraction(torch.bmm, 3, 128, width)
    p = program(model, (torch.randn(3, 2, 128),)).apply(products_as_linears)
    targets = [str(n.target) for n in p.gm.graph.nodes if n.op == "call_function"]
    assert targets.count("aten.linear.default") == count
    assert targets.count("aten.bmm.default") == (not count)


class Written(nn.Module):
    """A product by a buffer that every call writes: no constant."""

    def __init__(self, product):
        super().__init__()
        self.product = product
        self.register_buffer("w", torch.ones(6, 6))

    def forward(self, x):
        y = self.product(x, self.w)
        self.w.mul_(0.5)
        return y


@pytest.mark.parametrize(
    "product",
    [
        lambda x, w: w @ x,
        lambda x, w: x @ w,
        lambda x, w: torch.einsum("bmk,nk->bmn", x, w),
    ],
    ids=["from the left", "from the right", "einsum"],
)
def test_product_when_calls_write_its_matrix_then_it_stays(program, product):
    gm = program(Written(product), (torch.randn(2, 6, 6),)).gm
    assert not products_as_linears(gm).changed
    assert not einsums_as_linears(gm).changed


@pytest.mark.parametrize("product", [torch.matmul, lambda x, w: w @ x], ids=["right", "left"])
def test_product_when_several_are_of_one_constant_then_they_read_one_weight(program, product):
    class Loop(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(6, 6, generator=torch.Generator().manual_seed(1)))

        def forward(self, x):
            for _ in range(3):
                x = torch.tanh(product(x, self.w))
            return x

    p = program(Loop(), (torch.randn(2, 6, 6, generator=torch.Generator().manual_seed(2)),))
    p.apply(products_as_linears, drop_dead_constants)
    linears = [n for n in p.gm.graph.nodes if n.target is torch.ops.aten.linear.default]
    assert len(linears) == 3
    assert len({n.args[1] for n in linears}) == 1
    p.matches()


@given(data())
@settings(deadline=None, max_examples=40)
def test_matmul_when_of_any_ranks_and_sizes_then_the_same_values(draws):
    """Axes are left out, or have size 1, as broadcasting allows."""
    batch = draws.draw(lists(integers(1, 3), max_size=2))
    m, k, n = (draws.draw(integers(1, 4)) for _ in range(3))
    left, right = (
        [size if draws.draw(booleans()) else 1 for size in batch][draws.draw(integers(0, 2)) :]
        for _ in range(2)
    )
    shapes = [*left, m, k], [*right, k, n]
    x, w = (torch.randn(shape, generator=torch.Generator().manual_seed(2)) for shape in shapes)
    at = draws.draw(integers(0, 1))
    held = (x, w)[at]

    class Product(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(held)

        def forward(self, v):
            return self.w @ v if at == 0 else v @ self.w

    value = (w, x)[at]
    gm = torch.export.export(Product(), (value,)).module()
    run_passes(gm, (strip_guards, products_as_linears))
    torch.testing.assert_close(gm(value), x @ w)


class Blocks(nn.Module):
    """A block-diagonal layer, tokens mixed from the left, and a layer of joined axes."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.blocks = nn.Parameter(torch.randn(4, 16, 16, generator=generator) / 4)
        self.mix = nn.Parameter(torch.randn(9, 9, generator=generator) / 3)
        self.joined = nn.Parameter(torch.randn(4, 16, 10, generator=generator) / 8)

    def forward(self, x):
        y = x.unflatten(-1, (4, 16)).transpose(1, 2) @ self.blocks
        y = torch.relu(y.transpose(1, 2).flatten(2))
        y = torch.relu(self.mix @ y)
        return torch.tensordot(y.unflatten(-1, (4, 16)), self.joined, dims=2)


@pytest.mark.parametrize("recipe", ["int8", "int8_dynamic"])
@pytest.mark.parametrize("backend", ["onnx", "xnnpack", "cpu"])
def test_contractions_when_lowered_then_in_integers_and_near_float(backend, recipe, tmp_path):
    if backend == "cpu" and recipe == "int8_dynamic":
        pytest.skip("held by the other two")
    target = pq.backends.get(backend).allowing_slower()
    model, x = Blocks().eval(), torch.randn(2, 9, 64, generator=torch.Generator().manual_seed(1))
    program = torch.export.export(model, (x,), dynamic_shapes=({0: Dim("batch", max=8)},))
    prepared = pq.prepare_pt2e(program, target.quantizer(recipe), effort="fast")
    other = torch.randn(5, 9, 64, generator=torch.Generator().manual_seed(2))
    prepared = pq.calibrate(prepared, [(x,), (other,)], progress=False)
    canonical = pq.convert_pt2e(prepared)
    artifact = target.lower(canonical)
    artifact.save(path := tmp_path / f"blocks{target.suffix}")
    loaded = target.load(path)
    for batch in (x, other):
        with torch.no_grad():
            expected = model(batch)
        for made in (artifact, loaded):
            assert sqnr_db([expected], [made.run(batch)]) > 25
    kinds = {"onnx": "MatMulIntegerToFloat", "xnnpack": "FullyConnected"}
    counts = artifact.report.integer_ops
    assert sum(counts.values()) >= 6 if backend == "cpu" else counts[kinds[backend]] >= 5
