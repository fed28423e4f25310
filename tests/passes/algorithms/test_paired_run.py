"""The paired run: both values at each node, corrections that later nodes see, blocks."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import nn

import pt2e_quant as pq
from pt2e_quant.core.provenance import provenance_of
from pt2e_quant.graph.ops import CONV, LINEAR, argument
from pt2e_quant.observers.statistics.base import Statistics
from pt2e_quant.observers.statistics.kept_inputs import MOST_CALLS
from pt2e_quant.passes.algorithms import Algorithm, AlgorithmGraph, Declined, Site, Stage
from pt2e_quant.passes.algorithms import paired_run as module
from pt2e_quant.passes.algorithms.gathered import Gathered
from pt2e_quant.passes.algorithms.paired_run import Pair, PairedRun, blocks

pytestmark = pytest.mark.usefixtures("unmeasured")

SEEN: list[tuple[str, list[Pair]]] = []


@dataclass(frozen=True, slots=True, kw_only=True)
class Look(Algorithm):
    """Keeps what the paired run says of each weight's operator; may double the bias."""

    name: ClassVar[str] = "look"
    paper: ClassVar[str] = "none"
    fits: ClassVar[str] = "linears and convolutions"
    stage: ClassVar[Stage] = Stage.CORRECTIONS
    needs_calls: ClassVar[bool] = True

    doubles_bias: bool = False
    order: int = 1

    def sites(self, graph: AlgorithmGraph) -> Iterable[Site]:
        calls = list(graph.calls((*LINEAR, *CONV)))
        return [Site(graph, node, "bias") for node in calls[:: self.order]]

    def apply(self, site: Site, statistics: Statistics | None) -> str:
        SEEN.append((site.node.name, list(site.graph.run.outputs(site.node))))
        if self.doubles_bias:
            bias = site.graph.constant(site.node, "bias")
            bias.set(bias.value * 2)
        return f"look: {site.graph.run.count} calls"


class Residual(nn.Module):
    """A stem, a block with a skip, a linear at the end."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.inner = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.outer, self.head = nn.Conv2d(8, 8, 1), nn.Linear(8, 5)

    def forward(self, x):
        x = self.stem(x).relu()
        x = (x + self.outer(self.inner(x).relu())).relu()
        return self.head(x.mean((2, 3)))


class Rows(nn.Module):
    """Two linears of a width that groups of 32 divide."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x):
        return self.down(torch.nn.functional.gelu(self.up(x)))


def images(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(1, 3, 6, 6, generator=generator) for _ in range(count)]


def rows(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(1, 4, 64, generator=generator) for _ in range(count)]


def prepared(model, data, backend: str, recipe: str, *algorithms):
    SEEN.clear()
    quantizer = pq.backends.get(backend).quantizer(recipe)
    if (backend, recipe) == ("xnnpack", "int8"):  # a row's scale turns codes at ties
        quantizer.remove_algorithm("run_time_scales")
    program = torch.export.export(model.eval(), (data[0],))
    gm = pq.prepare_pt2e(program, quantizer, algorithms=algorithms, effort="fast")
    return pq.calibrate(gm, data, progress=False) if data else gm


@pytest.mark.parametrize(
    ("model", "backend", "recipe"),
    [
        (Residual, "onnx", "int8"),
        (Residual, "xnnpack", "int8"),
        (Rows, "xnnpack", "int8_dynamic"),
        (Rows, "onnx", "int8_dynamic"),
        (Rows, "xnnpack", "a8w4_g32"),
        (Rows, "onnx", "w4_g32"),
        (Rows, "onnx", "w3"),
        (Rows, "cuda", "fp8"),
    ],
)
def test_rounded_value_when_the_last_node_is_reached_then_that_of_the_converted_graph(
    model, backend, recipe
):
    data = images(4) if model is Residual else rows(4)
    gm = prepared(model(), data, backend, recipe, Look())
    converted = pq.convert_pt2e(gm)
    _, pairs = SEEN[-1]
    assert len(pairs) == len(data)
    for pair, x in zip(pairs, data, strict=True):
        with torch.no_grad():
            torch.testing.assert_close(pair.exact, model()(x), rtol=0, atol=2e-6)
            found = converted(x)
        # an output that is quantized too is up to half a step away
        own = [r.scale[0] for r in provenance_of(converted).tensors if r.name == "linear"]
        step = own[0] if own else 0.0
        assert float((pair.rounded - found).abs().max()) <= 0.501 * step + 2e-6
        assert not torch.equal(pair.rounded, pair.exact)


def test_exact_value_when_weights_were_changed_before_then_still_that_of_the_float_model():
    model, data = Rows(), rows(4)
    gm = prepared(model, data, "onnx", "w3", "gptq", Look(doubles_bias=True))
    pq.convert_pt2e(gm)
    (_, first), (_, last) = SEEN
    with torch.no_grad():
        torch.testing.assert_close(first[0].exact, model.up(data[0]), rtol=0, atol=2e-6)
        torch.testing.assert_close(last[0].exact, model(data[0]), rtol=0, atol=2e-6)
        model.up.bias.mul_(2)
        doubled = model(data[0])
    # the second operator sees the doubled bias of the first
    assert (last[0].rounded - doubled).norm() < 0.9 * (last[0].rounded - last[0].exact).norm()


def test_exact_outputs_when_they_were_asked_for_then_not_computed_again(monkeypatch):
    counts: Counter[tuple[str, bool]] = Counter()
    compute = PairedRun._compute

    def counted(self, node, call, *, exact, own=None):
        counts[node.name, exact] += 1
        return compute(self, node, call, exact=exact, own=own)

    monkeypatch.setattr(PairedRun, "_compute", counted)
    pq.convert_pt2e(prepared(Rows(), rows(4), "onnx", "w3", Look(doubles_bias=True)))
    assert (counts["linear", True], counts["linear", False]) == (4, 8)


def test_kept_calls_when_there_are_many_then_a_sample_that_is_the_same_each_time():
    chosen = []
    for _ in range(2):
        gm = prepared(Rows(), rows(60), "onnx", "w3", Look())
        pq.convert_pt2e(gm)
        chosen.append(torch.stack([pair.exact for pair in SEEN[0][1]]))
        assert f"linear: look: {MOST_CALLS} calls" in provenance_of(gm).notes
    assert torch.equal(*chosen)
    with torch.no_grad():
        late = Rows().up(torch.cat(rows(60)[MOST_CALLS:]))
    kept = chosen[0].reshape(MOST_CALLS, 4, 128)
    assert any(torch.allclose(row, other, atol=1e-5) for row in kept for other in late)


def test_calls_when_their_values_take_too_much_then_fewer_are_run(monkeypatch):
    monkeypatch.setattr(module, "MOST_BYTES", 3 * 2 * 4 * 4 * (128 + 128))
    gm = prepared(Rows(), rows(8), "onnx", "w3", Look())
    pq.convert_pt2e(gm)
    assert "linear: look: 3 calls" in provenance_of(gm).notes


def test_a_site_when_it_has_been_passed_then_refused():
    gm = prepared(Rows(), rows(2), "onnx", "w3", Look(order=-1))
    with pytest.raises(ValueError, match="linear has been passed: sites come in graph order"):
        pq.convert_pt2e(gm)


def test_run_when_no_call_came_then_declined():
    gm = prepared(Rows(), rows(1), "onnx", "w3")
    with pytest.raises(Declined, match="no calibration data"):
        _ = AlgorithmGraph(gm, Gathered()).run


def test_blocks_when_a_skip_goes_past_then_one_block_and_replayed_it_gives_its_output():
    gm = prepared(Residual(), images(2), "onnx", "int8")
    found = blocks(gm)
    weights = [[n.name for n in b.nodes if "conv" in n.name or "linear" in n.name] for b in found]
    assert weights == [["conv2d"], ["conv2d_1", "conv2d_2"], ["linear"]]
    run = module.PairedRun(gm, {gm.graph.find_nodes(op="placeholder")[0]: images(2)}, {})
    run.reach(found[1].nodes[0])
    exact = run.replay(found[1], 1, {}, exact=True)
    weight = argument(next(n for n in found[1].nodes if n.name == "conv2d_1"), "weight")
    value = Residual().inner.weight.detach().requires_grad_()
    rounded = run.replay(found[1], 1, {weight: value}, exact=False)
    (rounded - exact).square().sum().backward()
    assert value.grad is not None
    assert float(value.grad.norm()) > 0
    run.reach(found[2].nodes[0])
    _, second = run.operands(found[1].output)
    assert torch.equal(exact, second.exact)


class Noisy(Rows):
    """Noise as large as the values between the linears; its rows may be counted by it, too."""

    def __init__(self, *, drops_rows: bool = False) -> None:
        super().__init__()
        self.drops_rows = drops_rows

    def forward(self, x):
        x = self.up(x)
        x = x + torch.randn_like(x)
        if self.drops_rows:
            x = x[0][(x[0, :, 0] * 1e6).floor().remainder(2).nonzero().flatten()]
        return self.down(x)


def test_values_when_numbers_are_drawn_then_both_have_the_same():
    pq.convert_pt2e(prepared(Noisy(), rows(4), "xnnpack", "int8", Look()))
    _, pairs = SEEN[-1]
    exact, rounded = (torch.stack([getattr(p, kind) for p in pairs]) for kind in Pair.__slots__)
    assert float((exact - rounded).std() / exact.std()) < 0.1


def test_outputs_when_sizes_differ_by_rounding_then_declined():
    gm = prepared(Noisy(drops_rows=True), rows(8), "xnnpack", "int8", Look())
    skipped = " ".join(provenance_of(pq.convert_pt2e(gm)).notes)
    assert "sizes that depend on values differ between the float and the rounded run" in skipped
