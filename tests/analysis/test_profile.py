import pytest
import torch
from torch import nn

import pt2e_quant as pq
from pt2e_quant.core.errors import InputError, UnsupportedError


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).eval()


def test_profile_when_given_a_program_then_times_it_in_torch(model):
    x = torch.randn(2, 8)
    found = pq.profile(torch.export.export(model, (x,)), (x, "a label"), inputs=0)
    assert [node.kernel for node in found.nodes] == ["aten.linear", "aten.relu", "aten.linear"]
    assert found.runtime == "torch"


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 4)

    def forward(self, ids, *, mask):
        return self.linear(ids * mask)


def test_profile_and_evaluate_when_a_program_takes_keywords_then_they_call_it_so():
    batch = {"ids": torch.randn(2, 8), "mask": torch.ones(2, 8)}
    model = Masked().eval().requires_grad_(False)
    program = torch.export.export(model, (), batch)
    for form in (program, program.module()):
        assert [n.node for n in pq.profile(form, batch).nodes] == ["mul", "linear"]
        found = pq.evaluate(form, [batch], lambda outputs, _: outputs.sum(), progress=False)
        assert found == pytest.approx(float(model(**batch).sum()))


def test_tune_when_a_program_takes_keywords_then_it_is_timed_without_a_profiler():
    pytest.importorskip("executorch")
    batches = [{"ids": torch.randn(64, 8), "mask": torch.ones(64, 8)} for _ in range(2)]
    program = torch.export.export(Masked().eval(), (), batches[0])
    options = {"backend": "xnnpack", "points": 0, "menu": [], "progress": False}
    with pytest.raises(UnsupportedError, match="float model is the best that meets the budget"):
        pq.tune(program, calibration_data=batches, budget={"latency_us": 1e6}, **options)


def test_profile_when_given_an_artifact_then_asks_its_runtime(model):
    x = torch.randn(2, 8)
    artifact = pq.quantize(model, (x,), backend="onnx", recipe="int8_dynamic", progress=False)
    assert "linear" in {node.node for node in pq.profile(artifact, {"input": x}).nodes}


def test_profile_when_the_runtime_has_no_tracer_then_says_so(model, plain_backend):
    x = torch.randn(2, 8)
    artifact = pq.quantize(
        model, (x,), calibration_data=[x], backend=plain_backend, verify=False, progress=False
    )
    with pytest.raises(UnsupportedError, match="Plain does not report the times of its operators"):
        pq.profile(artifact, x)


def test_profile_when_given_a_pte_then_says_why_not_and_what_else_does(model):
    pytest.importorskip("executorch")
    x = torch.randn(2, 8)
    artifact = pq.quantize(
        model, (x,), calibration_data=[x], backend="xnnpack", verify=False, progress=False
    )
    with pytest.raises(UnsupportedError, match="event tracer") as told:
        pq.profile(artifact, x)
    assert "pt2e-quant bench" in str(told.value)
    assert 'backend="onnx"' in str(told.value)


def test_profile_when_given_a_plain_module_then_names_the_fix(model):
    with pytest.raises(InputError, match=r"torch\.export\.export"):
        pq.profile(model, torch.randn(2, 8))
