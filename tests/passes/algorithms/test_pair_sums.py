"""Weights whose pairs of products fit into 16 bits."""

import pytest
import torch
from torch import nn

import pt2e_quant as pq
from pt2e_quant.core.pair_sums import MOST, greatest_pairs
from pt2e_quant.graph.meta import constant_of

NAMES = ["pair_scales", "pair_codes"]
pytestmark = pytest.mark.usefixtures("unmeasured")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(
            nn.Conv2d(3, 16, 3),
            nn.ReLU(),
            nn.Conv2d(16, 16, 3, groups=16),
            nn.ReLU(),
            nn.Conv2d(16, 24, 1, groups=2),
            nn.Flatten(),
            nn.Linear(24 * 6 * 6, 10),
        )

    def forward(self, x):
        return self.body(x)


def data(count: int = 32) -> list[tuple[torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(1, 3, 10, 10, generator=generator),) for _ in range(count)]


def converted(backend: str = "onnx", without=(), effort: str = "balanced"):
    quantizer = pq.backends.get(backend).quantizer("int8")
    for name in without:
        quantizer.remove_algorithm(name)
    program = torch.export.export(Net().eval(), data(1)[0])
    prepared = pq.prepare_pt2e(program, quantizer, effort=effort)
    return pq.convert_pt2e(pq.calibrate(prepared, data(), progress=False))


def codes(gm) -> dict[str, torch.Tensor]:
    """The int8 constants of a graph by their names."""
    held = {str(n.target): constant_of(gm, n) for n in gm.graph.find_nodes(op="get_attr")}
    return {name: value for name, value in held.items() if value.dtype is torch.int8}


def sqnr(gm) -> float:
    model = Net().eval()
    pairs = [(model(x), gm(x)) for (x,) in data(64)]
    return pq.sqnr_db(*(torch.cat(side) for side in zip(*pairs, strict=True)))


@pytest.mark.parametrize("effort", ["fast", "balanced"])
def test_pair_algorithms_when_converted_then_all_but_depthwise_weights_fit(effort) -> None:
    plain, made = codes(converted(without=NAMES, effort=effort)), codes(converted(effort=effort))
    over = {name for name, value in plain.items() if float(greatest_pairs(value).max()) > MOST}
    assert len(over) >= 3
    for name, value in made.items():
        is_depthwise = value.dim() == 4 and value.shape[1] == 1
        if is_depthwise:
            assert torch.equal(value, plain[name])
        else:
            assert float(greatest_pairs(value).max()) <= MOST


def test_pair_scales_when_alone_then_nearest_integers_fit_too() -> None:
    made = codes(converted(without=["pair_codes"], effort="fast"))
    weights = [v for v in made.values() if v.dim() == 2 or v.shape[1] > 1]
    assert all(float(greatest_pairs(value).max()) <= MOST for value in weights)


def test_pair_algorithms_when_converted_then_little_is_lost() -> None:
    assert sqnr(converted()) > sqnr(converted(without=NAMES)) - 1.5


class Twice(nn.Module):
    """A layer that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 8)

    def forward(self, x):
        return self.last(self.first(x) + self.first(0.5 * x))


@pytest.mark.parametrize("backend", ["onnx", "cpu"])
def test_pair_algorithms_when_a_weight_is_read_twice_then_it_fits_too(backend) -> None:
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(1))
    quantizer = pq.backends.get(backend).quantizer("int8").allowing("slower")
    prepared = pq.prepare_pt2e(torch.export.export(Twice().eval(), (x,)), quantizer)
    made = codes(pq.convert_pt2e(pq.calibrate(prepared, [(x,)], progress=False)))
    assert len(made) == 2
    assert all(float(greatest_pairs(value).max()) <= MOST for value in made.values())


@pytest.mark.parametrize("algorithm", ["auto_round", "sequential_mse", "lwc", "hqq", "adaround"])
def test_pairs_when_an_algorithm_chooses_weights_then_they_fit_at_no_loss(algorithm):
    """One that shrinks scales again would have its largest integers lowered, by half of them."""
    program = torch.export.export(Net().eval(), data(1)[0])
    held, found = [torch.randn(1, 3, 10, 10) for _ in range(4)], []
    for names in ((), (algorithm,)):
        quantizer = pq.backends.get("onnx").quantizer("int8")
        prepared = pq.prepare_pt2e(program, quantizer, algorithms=names, effort="fast")
        gm = pq.convert_pt2e(pq.calibrate(prepared, data(8), progress=False))
        assert max(int(greatest_pairs(value).max()) for value in wide(codes(gm))) <= MOST
        found.append(pq.sqnr_db([Net()(x) for x in held], [gm(x) for x in held]))
    assert found[1] > found[0] - 1.0


def wide(values) -> list[torch.Tensor]:
    """Those of products that add up in 16 bits: not of depthwise convolutions."""
    return [value for value in values.values() if value.shape[1] > 1]
