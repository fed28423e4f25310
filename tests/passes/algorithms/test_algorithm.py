"""Algorithms from outside: on any quantizer, by whatever way they are added."""

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn

import pt2e_quant as pq
from pt2e_quant.core.errors import ConfigError
from pt2e_quant.core.provenance import provenance_of
from pt2e_quant.flow.calibrate.sample import sqnr_db
from pt2e_quant.graph.ops import LINEAR
from pt2e_quant.observers.statistics.base import Statistics
from pt2e_quant.passes.algorithms import Algorithm, AlgorithmGraph, Gptq, Site

OUTLIERS = torch.ones(32).index_fill_(0, torch.tensor([3, 11]), 40.0)


class Mean(Statistics):
    """The mean of each channel."""

    def __init__(self) -> None:
        super().__init__()
        self.total, self.rows = torch.zeros(()), 0

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        self.total, self.rows = self.total + rows.sum(0), self.rows + len(rows)
        return x

    @property
    def seen(self) -> bool:
        return self.rows > 0

    def scaled(self, factors: Tensor) -> "Mean":
        made = copy.copy(self)
        made.total = self.total * factors
        return made


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectBias(Algorithm):
    """Takes the mean error of rounded weights off the bias."""

    name: ClassVar[str] = "correct_bias"
    paper: ClassVar[str] = "Nagel et al. 2019, arXiv 1906.04721, section 4.2"
    fits: ClassVar[str] = "linears with integer weights and a bias"

    def sites(self, graph: AlgorithmGraph) -> Iterable[Site]:
        return [Site(graph, linear, "bias") for linear in graph.calls(LINEAR)]

    def statistics(self, site: Site) -> Mean:
        return Mean()

    def apply(self, site: Site, statistics: Statistics | None) -> str:
        assert isinstance(statistics, Mean)
        weight = site.graph.constant(site.node, "weight", keeps_qparams=True)
        bias = site.graph.constant(site.node, "bias")
        error = weight.grid().nearest(weight.value) - weight.value
        bias.set(bias.value - error @ (statistics.total / statistics.rows))
        return "correct_bias: took the mean error off the bias"


class Normed(nn.Module):
    """Two linears behind a norm with outlier channels and a mean."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 48), nn.Linear(48, 8)
        with torch.no_grad():
            self.norm.weight.mul_(OUTLIERS)
            self.norm.bias.fill_(2.0)
            self.up.weight.div_(OUTLIERS)

    def forward(self, x):
        return self.down(torch.relu(self.up(self.norm(x))))


def data(count: int = 8, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(1, 16, 32, generator=generator) for _ in range(count)]


def quality(model, quantizer, *algorithms) -> tuple[float, torch.fx.GraphModule]:
    program = torch.export.export(model.eval(), (data()[0],))
    prepared = pq.prepare_pt2e(program, quantizer, algorithms=algorithms)
    gm = pq.convert_pt2e(pq.calibrate(prepared, data(), progress=False))
    with torch.no_grad():
        held = data(16, seed=1)
        return sqnr_db([model(x) for x in held], [gm(x) for x in held]), gm


def foreign():
    """ExecuTorch's own quantizer, whose activations have histograms."""
    module = pytest.importorskip("executorch.backends.xnnpack.quantizer.xnnpack_quantizer")
    config = module.get_symmetric_quantization_config(is_per_channel=True)
    return module.XNNPACKQuantizer().set_global(config)


def test_foreign_quantizer_when_smoothed_then_6_db_nearer():
    plain, _ = quality(Normed(), foreign())
    found, gm = quality(Normed(), foreign(), "smooth_quant")
    assert found > plain + 6
    assert "smooth_quant" in provenance_of(gm).passes


def test_foreign_quantizer_when_gptq_rounds_weights_then_no_worse_and_on_record():
    plain, _ = quality(Normed(), foreign(), "smooth_quant")
    found, gm = quality(Normed(), foreign(), "smooth_quant", Gptq(block_size=8))
    assert found > plain - 0.1
    assert sum("gptq: " in step for r in provenance_of(gm).tensors for step in r.steps) == 2


def test_algorithm_from_outside_when_added_then_its_statistics_and_its_step():
    quantizer = pq.backends.get("onnx").quantizer("w3")
    plain, _ = quality(Normed(), pq.backends.get("onnx").quantizer("w3"))
    found, gm = quality(Normed(), quantizer.add_algorithm(CorrectBias()))
    assert found > plain + 0.5
    assert "linear: correct_bias: took the mean error off the bias" in provenance_of(gm).notes
    assert not any("statistics" in name for name, _ in gm.named_modules())


def test_algorithm_when_removed_then_it_is_not_run():
    quantizer = pq.backends.get("onnx").quantizer("int8").remove_algorithm("smooth_quant")
    _, gm = quality(Normed(), quantizer)
    assert "smooth_quant" not in provenance_of(gm).passes
    with pytest.raises(ConfigError, match='no algorithm "smooth_quant"'):
        quantizer.remove_algorithm("smooth_quant")


def test_training_when_an_algorithm_was_asked_for_then_refused():
    program = torch.export.export(Normed().eval(), (data()[0],))
    quantizer = pq.backends.get("onnx").quantizer("int8").add_algorithm("gptq")
    with pytest.raises(ConfigError, match="gptq works on calibrated weights, which training"):
        pq.prepare_qat_pt2e(program, quantizer)


@pytest.mark.parametrize("backend", ["onnx", "xnnpack"])
def test_one_call_when_an_algorithm_is_named_then_in_the_artifact(backend):
    pytest.importorskip("onnxruntime" if backend == "onnx" else "executorch")
    artifact = pq.quantize(
        Normed().eval(),
        (data()[0],),
        calibration_data=data(),
        backend=backend,
        recipe="w4" if backend == "xnnpack" else "w3",
        algorithms=["gptq"],
        progress=False,
    )
    assert any(
        "less output error" in s for r in artifact.report.provenance.tensors for s in r.steps
    )


def test_prepared_program_when_saved_then_its_statistics_come_back(tmp_path):
    program = torch.export.export(Normed().eval(), (data()[0],))
    quantizer = pq.backends.get("onnx").quantizer("int8").add_algorithm("gptq")
    prepared = pq.calibrate(pq.prepare_pt2e(program, quantizer), data(), progress=False)
    pq.save(prepared, tmp_path / "prepared.ptq")
    loaded = pq.load(tmp_path / "prepared.ptq")
    x = data()[0]
    expected = pq.convert_pt2e(copy.deepcopy(prepared))(x)
    assert torch.equal(pq.convert_pt2e(loaded)(x), expected)
