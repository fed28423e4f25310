"""Scales of run time: what calibration did not show, and which linears keep calibrated ranges."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

import pt2e_quant as pq
from pt2e_quant.core.provenance import provenance_of
from pt2e_quant.flow.calibrate.sample import sqnr_db
from pt2e_quant.passes.algorithms import RunTimeScales

CHOICE = torch.ops.quantized_decomposed.choose_qparams_per_token_asymmetric.default


class Pooled(nn.Module):
    """A convolution whose mean over the map a head reads."""

    def __init__(self, *head: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Conv2d(3, 32, 1), nn.Sequential(*head or (nn.Linear(32, 10),))
        nn.init.uniform_(self.body.weight, 0.1, 1.0)
        nn.init.zeros_(self.body.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.body(x)).mean((2, 3)))


def spots(count: int) -> list[Tensor]:
    """Images of one bright spot: the map reaches far, its mean does not."""
    generator = torch.Generator().manual_seed(0)
    found = torch.zeros(count, 1, 3, 8, 8)
    found[:, :, :, 3, 4] = 10.0 * torch.rand(count, 1, 3, generator=generator)
    return [*found.clamp(min=0)]


def even(count: int) -> list[Tensor]:
    """Images as bright as half a spot everywhere."""
    generator = torch.Generator().manual_seed(1)
    return [4.0 + torch.rand(1, 3, 8, 8, generator=generator) for _ in range(count)]


def converted(
    model: nn.Module, data: Sequence[Tensor], quantizer: Any, *algorithms: Any, **how: Any
) -> GraphModule:
    program = torch.export.export(model.eval(), (data[0],))
    how = {"effort": "fast", **how} if not algorithms else how
    prepared = pq.prepare_pt2e(program, quantizer, algorithms=algorithms, **how)
    return pq.convert_pt2e(pq.calibrate(prepared, data, progress=False))


def dynamic_linears(gm: GraphModule) -> int:
    return len(gm.graph.find_nodes(op="call_function", target=CHOICE))


def quality(gm: GraphModule, model: nn.Module, data: Sequence[Tensor]) -> float:
    with torch.no_grad():
        return sqnr_db([model(x) for x in data], [gm(x) for x in data])


@pytest.mark.parametrize("backend", ["xnnpack", "onnx"])
def test_head_when_a_mean_exceeds_calibration_then_it_does_not_clip(backend):
    model, target = Pooled(), pq.backends.get(backend)
    made = converted(model, spots(8), target.quantizer("int8"))
    plain = converted(model, spots(8), target.quantizer("int8").remove_algorithm("run_time_scales"))
    assert dynamic_linears(made) == 1
    assert dynamic_linears(plain) == 0
    assert quality(made, model, even(4)) > 30 > 10 > quality(plain, model, even(4))


def test_head_when_lowered_then_the_runtimes_agree_with_the_graph():
    model = Pooled()
    for backend in ("xnnpack", "onnx"):
        target = pq.backends.get(backend)
        artifact = target.lower(converted(model, spots(8), target.quantizer("int8")))
        with torch.no_grad():
            wanted = [model(x) for x in even(4)]
        assert sqnr_db(wanted, [artifact.run(x) for x in even(4)]) > 30


def test_linear_when_all_around_it_is_float_then_a_scale_for_each_row_and_no_rounded_output():
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64), nn.ReLU(), nn.LayerNorm(64))
    data = [torch.randn(1, 16, 64) * torch.logspace(0, 2, 16)[:, None] for _ in range(8)]
    gm = converted(model, data, pq.backends.get("xnnpack").quantizer("int8"))
    assert dynamic_linears(gm) == 1
    quantizes = torch.ops.quantized_decomposed.quantize_per_tensor.default
    assert not gm.graph.find_nodes(op="call_function", target=quantizes)
    reasons = {record.node: record.reason for record in provenance_of(gm).floats}
    assert "takes its scales at run time" in reasons["relu"]


def test_linears_when_one_feeds_the_other_in_integers_then_calibrated_with_the_reason():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
    data = [torch.randn(4, 16) for _ in range(4)]
    gm = converted(model, data, pq.backends.get("xnnpack").quantizer("int8"))
    assert dynamic_linears(gm) == 0
    notes = provenance_of(gm).notes
    assert any("linear_1 reads it in integers" in note for note in notes)
    assert any("relu gives it integers" in note for note in notes)


def test_pool_when_others_read_it_in_integers_then_calibrated():
    class Gated(Pooled):
        def forward(self, x: Tensor) -> Tensor:
            x = torch.relu(self.body(x))
            pooled = nn.functional.adaptive_avg_pool2d(x, 1)
            return self.head(pooled.flatten(1)), torch.relu(x + pooled)

    gm = converted(Gated(), even(8), pq.backends.get("xnnpack").quantizer("int8"))
    assert dynamic_linears(gm) == 0
    assert any("is read by others too" in note for note in provenance_of(gm).notes)


def test_linear_of_rows_when_only_pooled_features_are_meant_then_calibrated():
    model = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64))
    data = [torch.randn(1, 16, 64) for _ in range(4)]
    quantizer = pq.backends.get("xnnpack").quantizer("int8")
    gm = converted(model, data, quantizer, RunTimeScales(pooled_only=True))
    assert dynamic_linears(gm) == 0
    assert any("its input is no pooled feature" in note for note in provenance_of(gm).notes)


def test_recipe_when_a_program_is_to_compute_in_integers_alone_then_left_out():
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)
    )
    quantizer = pq.backends.get("xnnpack").quantizer("int8")
    gm = converted(model, even(4), quantizer, int_only=True)
    assert dynamic_linears(gm) == 0


def test_head_when_a_foreign_quantizer_annotated_it_then_scales_of_run_time():
    module = pytest.importorskip("executorch.backends.xnnpack.quantizer.xnnpack_quantizer")
    config = module.get_symmetric_quantization_config(is_per_channel=True)
    model, found = Pooled(), []
    for names in ((), ("run_time_scales",)):
        quantizer = module.XNNPACKQuantizer().set_global(config)
        found.append(quality(converted(model, spots(8), quantizer, *names), model, even(4)))
    assert found[1] > found[0] + 10
