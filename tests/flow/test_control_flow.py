"""Weights inside cond, scan and while_loop are quantized as anywhere else."""

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.export import export

from pt2e_quant.core.errors import CalibrationError
from pt2e_quant.core.provenance import provenance_of
from pt2e_quant.core.qdq import is_dequantize
from pt2e_quant.flow.calibrate.calibrate import calibrate
from pt2e_quant.flow.calibrate.sample import sqnr_db
from pt2e_quant.flow.convert.convert_pt2e import convert_pt2e
from pt2e_quant.flow.prepare.prepare_pt2e import prepare_pt2e
from pt2e_quant.flow.reexport import export_again


class Cond(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda y: self.a(y), lambda y: self.b(y).relu(), (x,)) + 1


class Scan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        def step(carry: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            new = torch.tanh(self.a(carry) + y)
            return new, new.clone()

        return scan(step, h, x)


class While(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        def more(i: Tensor, y: Tensor) -> Tensor:
            return i < 3

        def body(i: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            return i + 1, self.a(y)

        return while_loop(more, body, (torch.zeros((), dtype=torch.int64), x))[1]


CASES = [
    (Cond(), [(torch.ones(2, 4),), (-torch.ones(2, 4),)], {"a.weight", "b.weight"}),
    (Scan(), [(torch.randn(5, 2, 4), torch.randn(2, 4))], {"a.weight"}),
    (While(), [(torch.randn(2, 4),)], {"a.weight"}),
]


@pytest.mark.parametrize(("model", "batches", "weights"), CASES, ids=["cond", "scan", "while"])
def test_weights_when_in_bodies_then_become_integers(quantizer, model, batches, weights):
    model = model.eval()
    prepared = prepare_pt2e(export(model, batches[0]), quantizer())
    quantized = convert_pt2e(calibrate(prepared, batches, progress=False))
    for batch in batches:
        assert sqnr_db(model(*batch), quantized(*batch)) > 25
    stored = {
        n.removesuffix("_q") for n, v in quantized.state_dict().items() if v.dtype == torch.int8
    }
    assert stored == weights
    assert not weights & set(quantized.state_dict())
    names = {r.name.split("/")[-1] for r in provenance_of(quantized).tensors}
    assert weights <= names
    bodies = [m for m in quantized.modules() if isinstance(m, torch.fx.GraphModule)]
    assert any(is_dequantize(n) for body in bodies[1:] for n in body.graph.nodes)


@pytest.mark.parametrize(("model", "batches", "weights"), CASES, ids=["cond", "scan", "while"])
def test_control_flow_when_converted_then_can_be_exported_again(quantizer, model, batches, weights):
    model = model.eval()
    prepared = prepare_pt2e(export(model, batches[0]), quantizer())
    quantized = convert_pt2e(calibrate(prepared, batches, progress=False))
    again = export_again(quantized).module()
    for batch in batches:
        assert sqnr_db(quantized(*batch), again(*batch)) > 60


def test_branch_when_no_batch_takes_it_then_it_stays_float_with_a_note(quantizer):
    model = Cond().eval()
    prepared = prepare_pt2e(export(model, (torch.ones(2, 4),)), quantizer())
    calibrate(prepared, [(torch.ones(2, 4),)], progress=False)
    quantized = convert_pt2e(prepared)
    assert any(is_dequantize(node) for node in quantized.true_graph_0.graph.nodes)
    assert not any(is_dequantize(node) for node in quantized.false_graph_0.graph.nodes)
    # The sum behind the branches has the range of the branch that ran.
    assert quantized(-torch.ones(2, 4)).shape == (2, 4)
    (note,) = [n for n in provenance_of(quantized).notes if "no calibration batch ran it" in n]
    assert note.startswith("false_graph_0/")


def test_branch_when_it_alone_is_observed_and_no_batch_takes_it_then_it_stays_float(quantizer):
    class OneSided(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x):
            return torch.cond(x.sum() > 0, torch.sin, lambda a: self.linear(a), (x,))

    x = torch.ones(2, 8)
    prepared = prepare_pt2e(export(OneSided().eval(), (x,)), quantizer())
    calibrate(prepared, [(x,)], progress=False)
    quantized = convert_pt2e(prepared)
    assert any("stays float" in note for note in provenance_of(quantized).notes)


def test_branches_when_nothing_was_calibrated_then_refused(quantizer):
    prepared = prepare_pt2e(export(Cond().eval(), (torch.ones(2, 4),)), quantizer())
    with pytest.raises(CalibrationError, match="saw no data"):
        convert_pt2e(prepared)


def test_weight_when_branches_share_it_then_stored_once(quantizer):
    class Shared(Cond):
        def forward(self, x: Tensor) -> Tensor:
            return torch.cond(x.sum() > 0, lambda y: self.a(y), lambda y: self.a(y) * 2, (x,))

    model, batches = Shared().eval(), [(torch.ones(2, 4),), (-torch.ones(2, 4),)]
    prepared = prepare_pt2e(export(model, batches[0]), quantizer())
    quantized = convert_pt2e(calibrate(prepared, batches, progress=False))
    assert sum(v.dtype == torch.int8 for v in quantized.state_dict().values()) == 1
    for batch in batches:
        assert sqnr_db(model(*batch), quantized(*batch)) > 25


def test_branches_when_of_constants_alone_then_can_be_quantized(quantizer):
    class Constants(Cond):
        def forward(self, x: Tensor) -> Tensor:
            rows = torch.cond(x.sum() > 0, lambda: self.a.weight * 2, lambda: self.b.weight + 1, ())
            return self.a(x) + rows[:2]

    model, batches = Constants().eval(), [(torch.ones(2, 4),), (-torch.ones(2, 4),)]
    prepared = prepare_pt2e(export(model, batches[0]), quantizer())
    quantized = convert_pt2e(calibrate(prepared, batches, progress=False))
    for batch in batches:
        assert sqnr_db(model(*batch), export_again(quantized).module()(*batch)) > 25


def test_program_with_bodies_when_quantized_then_it_still_runs(quantizer):
    model, batches = Cond().eval(), [(torch.ones(2, 4),), (-torch.ones(2, 4),)]
    program = export(model, batches[0])
    convert_pt2e(calibrate(prepare_pt2e(program, quantizer()), batches, progress=False))
    for batch in batches:
        assert torch.equal(program.module()(*batch), model(*batch))
