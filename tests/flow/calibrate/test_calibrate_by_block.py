"""Blocks one after the other: what each is given, what is in memory, and what refuses."""

import copy
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import ClassVar

import pytest
import torch
from torch import nn

import pt2e_quant as pq
from pt2e_quant.core.errors import CalibrationError, ConfigError, InputError, UnsupportedError
from pt2e_quant.flow.calibrate import calibrate_by_block as by_block
from pt2e_quant.graph.ops import LINEAR
from pt2e_quant.observers.statistics.base import Statistics
from pt2e_quant.observers.statistics.input_hessian import InputHessian
from pt2e_quant.passes.algorithms.algorithm import Algorithm, Site, Stage
from pt2e_quant.passes.algorithms.awq import Awq

WIDTH = 32


class Block(nn.Module):
    """A norm, two linears and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(nn.functional.silu(self.up(self.norm(x))))


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch(Algorithm):
    """Changes nothing; keeps what it was given, and how much else was gathered at that time."""

    name: ClassVar[str] = "watch"
    paper: ClassVar[str] = "none"
    fits: ClassVar[str] = "linears"

    hessians: dict[str, torch.Tensor] = field(default_factory=dict)
    others: list[int] = field(default_factory=list)

    def sites(self, graph) -> Iterable[Site]:
        return [Site(graph, linear, "input") for linear in graph.calls(LINEAR)]

    def statistics(self, site: Site) -> Statistics:
        return InputHessian()

    def apply(self, site: Site, statistics: Statistics | None) -> str:
        self.hessians[site.node.name] = statistics.hessian[0]
        modules = [m for m in site.graph.gm.modules() if isinstance(m, Statistics)]
        self.others.append(sum(module.seen for module in modules))
        return "seen"


@dataclass(frozen=True, slots=True, kw_only=True)
class Early(Watch):
    """Asks for whole calls before what runs by blocks."""

    name: ClassVar[str] = "early"
    needs_calls: ClassVar[bool] = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Late(Watch):
    """Runs by blocks, and late."""

    name: ClassVar[str] = "late"
    stage: ClassVar[Stage] = Stage.CODES


def stack(depth: int = 3) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(depth))).eval()


def samples(count: int = 4, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(2, 8, WIDTH, generator=generator) for _ in range(count)]


def prepared(model, recipe: str, *algorithms, backend: str = "onnx"):
    quantizer = pq.backends.get(backend).quantizer(recipe)
    for algorithm in quantizer.algorithms:
        quantizer.remove_algorithm(algorithm.name)
    program = torch.export.export(model, (samples()[0],))
    return pq.prepare_pt2e(program, quantizer, algorithms=algorithms)


def test_statistics_when_earlier_blocks_are_rounded_then_of_the_quantized_model():
    model, watch = stack(), Watch()
    gm = pq.calibrate_by_block(prepared(model, "w3", watch), samples(), progress=False)
    quantized = pq.convert_pt2e(gm)
    inputs = {}

    class Read(torch.fx.Interpreter):
        def run_node(self, n):
            result = super().run_node(n)
            if n.name == "linear_4":
                inputs.setdefault("rounded", []).append(self.env[n.args[0]].reshape(-1, WIDTH))
            return result

    for x in samples():
        Read(quantized).run(x)
    rows = torch.cat(inputs["rounded"])
    torch.testing.assert_close(watch.hessians["linear_4"], 2 * rows.T @ rows / len(rows))
    float_rows = torch.cat([model[2].norm(model[:2](x)).reshape(-1, WIDTH) for x in samples()])
    plain = 2 * float_rows.T @ float_rows / len(rows)
    assert (watch.hessians["linear_4"] - plain).abs().max() > 1e-3


def test_statistics_when_one_block_is_done_then_none_of_another_is_held():
    watch = Watch()
    pq.calibrate_by_block(prepared(stack(), "w4", watch), samples(), progress=False)
    assert len(watch.hessians) == 6
    assert watch.others == [0] * 6


def test_values_when_blocks_are_run_then_one_a_batch_goes_on(monkeypatch):
    held = []
    optimise = by_block._optimise

    def note(run, number, algorithms):
        optimise(run, number, algorithms)
        held.append([len(live) for live in run._live])

    monkeypatch.setattr(by_block, "_optimise", note)
    pq.calibrate_by_block(prepared(stack(), "w4", "gptq"), samples(), progress=False)
    assert held[:2] == [[1] * 4] * 2


@pytest.mark.parametrize("recipe", ["w3", "int8", "a8w4_g32"])
def test_gptq_when_by_block_then_no_worse_than_at_once(recipe):
    model, held = stack(), samples(8, seed=1)
    found = []
    for calibrate in (pq.calibrate, pq.calibrate_by_block):
        gm = calibrate(prepared(model, recipe, "gptq"), samples(16), progress=False)
        converted = pq.convert_pt2e(gm)
        assert not [m for m in converted.modules() if isinstance(m, Statistics)]
        found.append(pq.sqnr_db([model(x) for x in held], [converted(x) for x in held]))
    assert found[1] > found[0] - 1


def test_awq_when_it_changes_an_earlier_block_then_that_is_run_again():
    torch.manual_seed(0)
    model = nn.Sequential(*(m for _ in range(3) for m in (nn.Linear(WIDTH, WIDTH), nn.ReLU())))
    with torch.no_grad():
        model[0].weight[3:5] *= 50
        model[2].weight[:, 3:5] /= 50
    watch = Late()
    gm = pq.calibrate_by_block(
        prepared(model.eval(), "w8", Awq(clip=False), watch), samples(), progress=False
    )
    # rows of the first linear were divided by the factors of the second one's input
    assert not torch.equal(gm.get_parameter("0.weight"), model[0].weight)
    for x in samples(seed=1):
        torch.testing.assert_close(gm(x), model(x), rtol=1e-4, atol=1e-5)
    rows = torch.cat([model[:4](x).reshape(-1, WIDTH) for x in samples()])
    expected = 2 * rows.T @ rows / len(rows)
    factor = watch.hessians["linear_2"].diagonal() / expected.diagonal()
    assert factor.isfinite().any()


def test_buffers_when_the_model_writes_them_then_each_batch_once_and_restored():
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
            self.register_buffer("total", torch.zeros(WIDTH))

        def forward(self, x):
            y = self.first(x)
            self.total.add_(y.sum((0, 1)))
            return self.second(y + self.total)

    model = Counting().eval()
    x = samples()[0]
    expected = copy.deepcopy(model)(x)
    gm = pq.calibrate_by_block(prepared(model, "w8", "gptq"), samples(), progress=False)
    assert torch.equal(gm.total, torch.zeros(WIDTH))
    torch.testing.assert_close(pq.convert_pt2e(gm)(x), expected, rtol=0.1, atol=0.1)


def test_one_call_when_a_folder_is_named_then_by_block(tmp_path):
    artifact = pq.quantize(
        stack(),
        (samples()[0],),
        calibration_data=samples(),
        backend="onnx",
        recipe="w4",
        algorithms=["gptq"],
        resume=tmp_path / "run",
        progress=False,
    )
    assert artifact.report.sqnr_float_db > 10
    assert (tmp_path / "run" / "state.json").is_file()


def test_quantize_when_a_folder_is_named_without_data_then_refused(tmp_path):
    with pytest.raises(InputError, match="resume"):
        pq.quantize(stack(), (samples()[0],), backend="onnx", recipe="w4", resume=tmp_path)


def test_batches_when_there_are_none_then_refused():
    with pytest.raises(CalibrationError, match="no batch was run"):
        pq.calibrate_by_block(prepared(stack(), "w4"), [])


def test_control_flow_when_by_block_then_refused():
    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            return torch.cond(x.sum() > 0, self.linear, lambda y: y.clone(), (x,))

    with pytest.raises(UnsupportedError, match="control flow has no blocks"):
        pq.calibrate_by_block(prepared(Branch().eval(), "w4", backend="cpu"), samples())


def test_algorithms_when_one_of_whole_calls_comes_first_then_refused():
    gm = prepared(stack(), "w4", Early(), Late())
    with pytest.raises(ConfigError, match="early runs on whole calls, and has to run before late"):
        pq.calibrate_by_block(gm, samples())


def test_ranges_when_no_effort_is_asked_for_then_as_observed_and_said():
    quantizer = pq.backends.get("onnx").quantizer("int8")
    program = torch.export.export(stack(), (samples()[0],))
    gm = pq.prepare_pt2e(program, quantizer, algorithms=["gptq"])
    found = pq.convert_pt2e(pq.calibrate_by_block(gm, samples(), progress=False))
    notes = pq.provenance_of(found).notes
    told = (
        "ranges are as observed and no layer is left float for its own rounding and biases are as "
        "they are: block by block"
    )
    assert any(told in note for note in notes)
    assert any("gptq" in step for r in pq.provenance_of(found).tensors for step in r.steps)
