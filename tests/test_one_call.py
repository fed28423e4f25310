"""Model to artifact in one call, on both runtimes, without touching the model."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

import pt2e_quant as pq
from pt2e_quant.backends.cpu import policy
from pt2e_quant.core.errors import AnnotationError, CalibrationError, InputError


class Decoder(nn.Module):
    """A conv with batch norm, and a linear that writes a cache."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(8, 8, 3, padding=1)
        self.bn = nn.BatchNorm1d(8)
        self.key = nn.Linear(8, 8)
        self.register_buffer("cache", torch.zeros(1, 16, 8))

    def forward(self, x: Tensor, position: Tensor) -> dict[str, Tensor]:
        y = torch.relu_(self.bn(self.conv(x.transpose(1, 2)))).transpose(1, 2)
        self.cache[:, position] = self.key(y)
        return {"scores": y @ self.cache.transpose(1, 2), "last": y}


class Head(nn.Module):
    """Keyword inputs, one of them nested, and a nested result."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor, *, extra: dict[str, Tensor]) -> dict[str, object]:
        y = torch.relu(self.a(x) + extra["shift"])
        return {"logits": self.b(y), "parts": (y, None)}


def _decoder_inputs(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1, 2, 8, generator=generator), torch.tensor([seed, seed + 1])


def test_quantize_when_a_model_has_batch_norm_and_cache_then_leaves_it_bit_equal():
    pytest.importorskip("executorch")
    torch.manual_seed(0)
    model = Decoder().train()
    model.bn(torch.randn(4, 8, 5))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    artifact = pq.quantize(
        model,
        args=_decoder_inputs(0),
        calibration_data=[_decoder_inputs(i) for i in range(4)],
        backend="xnnpack",
        progress=False,
    )
    assert model.training
    assert model.bn.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    found = artifact.run(*_decoder_inputs(3))
    expected = model.eval()(*_decoder_inputs(3))
    assert set(found) == {"scores", "last"}
    assert pq.sqnr_db(expected, found) > 25


@pytest.mark.parametrize("backend", ["xnnpack", "onnx"])
def test_quantize_when_inputs_are_keywords_and_results_nested_then_both_runtimes_agree(backend):
    pytest.importorskip({"xnnpack": "executorch", "onnx": "onnxruntime"}[backend])
    torch.manual_seed(0)
    model = Head().eval()
    batches = [{"x": torch.randn(4, 8), "extra": {"shift": torch.randn(16)}} for _ in range(4)]
    artifact = pq.quantize(
        model,
        kwargs=batches[0],
        dynamic_shapes={"x": {0: torch.export.Dim("batch", max=32)}, "extra": {"shift": None}},
        calibration_data=batches,
        backend=backend,
        progress=False,
    )
    call = {"x": torch.randn(7, 8), "extra": {"shift": torch.randn(16)}}
    found, expected = artifact.run(**call), model(**call)
    assert set(found) == {"logits", "parts"}
    assert found["parts"][1] is None
    assert found["logits"].shape == (7, 4)
    assert pq.sqnr_db(expected, found) > 25


def test_quantize_when_a_model_has_no_example_inputs_then_refuses():
    with pytest.raises(InputError, match="needs example inputs"):
        pq.quantize(nn.Linear(2, 2), calibration_data=[], backend="xnnpack")


def test_quantize_when_batches_are_given_as_kwargs_then_refuses():
    x = torch.randn(1, 2)
    with pytest.raises(InputError, match="kwargs is a dict of keyword inputs, found a list"):
        pq.quantize(nn.Linear(2, 2), (x,), [x], backend="xnnpack")


def test_quantize_when_an_exported_program_comes_with_inputs_then_refuses():
    program = torch.export.export(nn.Linear(2, 2).eval(), (torch.randn(1, 2),))
    with pytest.raises(InputError, match="has its inputs and dynamic shapes already"):
        pq.quantize(program, (torch.randn(1, 2),), calibration_data=[], backend="xnnpack")


@pytest.mark.parametrize(("backend", "package"), [("onnx", "onnxruntime")])
def test_quantize_when_a_recipe_needs_no_data_then_none_is_asked_for(backend, package):
    pytest.importorskip(package)
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8)).eval()
    x = torch.randn(4, 64, generator=generator)
    artifact = pq.quantize(model, (x,), backend=backend, recipe="w4_g32")
    assert artifact.report.integer_ops == {"MatMulNBits": 2}
    assert torch.nn.functional.cosine_similarity(artifact.run(x), model(x)).min() > 0.98


def test_quantize_when_groups_do_not_divide_then_padded_by_choice_alone():
    pytest.importorskip("onnxruntime")
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(40, 32)).eval(), torch.randn(4, 40)
    with pytest.raises(AnnotationError, match="groups of 32 do not divide the 40 columns"):
        pq.quantize(model, (x,), backend="onnx", recipe="w4_g32")
    artifact = pq.quantize(model, (x,), backend="onnx", recipe="w4_g32", pad_groups=True)
    assert artifact.report.integer_ops == {"MatMulNBits": 1}
    assert torch.nn.functional.cosine_similarity(artifact.run(x), model(x)).min() > 0.98


def test_quantize_when_a_recipe_needs_data_and_there_is_none_then_refused():
    pytest.importorskip("onnxruntime")
    model = nn.Linear(8, 4)
    with pytest.raises(CalibrationError, match='recipe "int8" needs calibration data') as caught:
        pq.quantize(model, (torch.randn(1, 8),), backend="onnx")
    assert "calibration_data=batches" in str(caught.value)
    with pytest.raises(CalibrationError, match="calibration data is empty"):
        pq.quantize(model, (torch.randn(1, 8),), backend="onnx", calibration_data=[])


class EncoderDecoderCache:
    """As transformers has it: no pytree, and neither its parts."""


class Generator(nn.Module):
    def __init__(self, result):
        super().__init__()
        self.linear, self.result = nn.Linear(8, 8), result

    def forward(self, x):
        return self.linear(x), self.result


class Counted(nn.Module):
    def forward(self, x):
        return x + torch.arange(len(x)).unsqueeze(1)


class Narrowed(nn.Module):
    def forward(self, x):
        return x if x.shape[0] > 8 else x[:8] * 2


@pytest.mark.parametrize(
    ("model", "fix"), [(Counted(), "write x.shape"), (Narrowed(), "as torch suggests")]
)
def test_quantize_when_a_dynamic_size_is_not_free_then_names_the_way_out(model, fix):
    batch = torch.export.Dim("batch", min=2, max=64)
    with pytest.raises(InputError) as raised:
        pq.quantize(model, (torch.randn(4, 3),), dynamic_shapes=({0: batch},), backend="cpu")
    assert fix in raised.value.fix


@pytest.mark.parametrize(
    ("result", "fix"),
    [(EncoderDecoderCache(), "use_cache = False"), (range(3), "return tensors")],
)
def test_quantize_when_a_result_is_a_class_that_torch_does_not_know_then_names_the_way_out(
    result, fix
):
    with pytest.raises(InputError, match="not a known type") as found:
        pq.quantize(Generator(result), (torch.ones(2, 8),), backend="onnx", recipe="w8")
    assert fix in found.value.fix


@pytest.mark.parametrize(
    ("backend", "package"),
    [("xnnpack", "executorch"), ("onnx", "onnxruntime"), ("cpu", "torch")],
)
def test_quantize_when_inputs_are_tiny_then_as_near_as_of_ordinary_size(backend, package):
    pytest.importorskip(package)
    found = []
    for size in (1.0, 1e-9):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1)).eval()
        with torch.no_grad():
            model[0].bias.mul_(size)
            model[2].bias.mul_(size)
        batches = [torch.randn(1, 3, 8, 8) * size for _ in range(4)]
        artifact = pq.quantize(
            model,
            (batches[0],),
            calibration_data=batches,
            backend=backend,
            allow_slower=backend == "cpu",
            progress=False,
        )
        assert sum(artifact.report.integer_ops.values()) > 0
        x = torch.randn(1, 3, 8, 8) * size
        found.append(pq.sqnr_db(model(x), artifact.run(x)))
    assert found[1] > found[0] - 0.5


@pytest.mark.filterwarnings("ignore:no tensor of this graph")
@pytest.mark.parametrize("allow_slower", [False, True])
def test_quantize_when_integers_measured_slower_then_used_by_choice_alone(
    allow_slower, monkeypatch
):
    monkeypatch.setattr(policy, "measured_here", lambda op: SimpleNamespace(get=lambda *_: 0.5))
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).eval(), torch.randn(4, 8)
    artifact = pq.quantize(
        model,
        (x,),
        calibration_data=[x],
        backend="cpu",
        allow_slower=allow_slower,
        progress=False,
    )
    assert bool(artifact.report.integer_ops) is allow_slower
