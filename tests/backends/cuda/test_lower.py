"""The CUDA backend's lowering, run on the CPU: every fused operator by its definition."""

import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn

from pt2e_quant.backends import registry
from pt2e_quant.backends.cuda.backend import BACKEND
from pt2e_quant.backends.cuda.cuda_graph import capture_call
from pt2e_quant.backends.cuda.policy import Measures, policy_of
from pt2e_quant.backends.cuda.table import REGISTRY, table_of
from pt2e_quant.core.errors import (
    ArtifactError,
    ConfigError,
    InputError,
    Pt2eQuantWarning,
    UnsupportedError,
)
from pt2e_quant.core.provenance import provenance_of
from pt2e_quant.flow.calibrate.calibrate import calibrate
from pt2e_quant.flow.calibrate.sample import sqnr_db
from pt2e_quant.flow.convert.convert_pt2e import convert_pt2e
from pt2e_quant.flow.prepare.prepare_pt2e import prepare_pt2e
from pt2e_quant.graph.op_table import Constraint
from pt2e_quant.graph.show import show
from pt2e_quant.kernels.kernel import Device, Kernel
from pt2e_quant.kernels.registry import Registry
from pt2e_quant.one_call import quantize

pytestmark = pytest.mark.usefixtures("unmeasured")

ALLOWING = BACKEND.allowing_unmeasured()
BATCH = torch.export.Dim("batch", min=1, max=64)


class Residual(nn.Module):
    """Linears with every epilogue, and a residual sum."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(24, 40)
        self.second = nn.Linear(40, 40)
        self.third = nn.Linear(40, 40, bias=False)
        self.last = nn.Linear(40, 7)

    def forward(self, x):
        x = torch.relu(self.first(x))
        y = nn.functional.gelu(self.second(x))
        z = torch.relu(self.third(y) + x)
        return self.last(z)


def canonical(recipe="int8", model=None, batch=4, quantizer=None):
    torch.manual_seed(0)
    model = (model or Residual()).eval()
    x = torch.randn(batch, 24)
    ep = torch.export.export(model, (x,), dynamic_shapes=({0: BATCH},))
    prepared = prepare_pt2e(ep, quantizer or BACKEND.quantizer(recipe))
    if recipe == "int8":
        calibrate(prepared, [(torch.randn(16, 24),) for _ in range(4)], progress=False)
    return convert_pt2e(prepared), model


def calls(gm):
    return [line for line in show(gm).splitlines() if "pt2e_quant.int8_linear" in line]


def test_lower_when_linears_follow_one_another_then_each_is_one_call_and_integers_stay():
    gm, _ = canonical()
    artifact = ALLOWING.lower(gm)
    assert artifact.report.integer_ops == {"int8_linear": 4, "quantize": 2}
    first, second, third, last = calls(artifact.module)
    assert "activation=relu" in first
    assert "activation=gelu, out_dtype=i8" in second
    # The residual stream stays float: the first linear's own result, not its integers.
    assert "out_dtype=f32" in first
    assert "residual=int8_linear," in third
    assert "residual_scale" not in third
    assert "activation=relu, out_dtype=i8" in third
    assert "out_dtype=f32, label=last linear_3 contiguous" in last


@pytest.mark.parametrize("recipe", ["int8", "int8_dynamic", "int8_dynamic_per_tensor"])
@pytest.mark.parametrize("batch", [1, 7, 33])
def test_artifact_when_the_batch_has_any_size_then_its_result_is_the_canonical_one(recipe, batch):
    gm, model = canonical(recipe)
    artifact = ALLOWING.lower(gm)
    x = torch.randn(batch, 24)
    expected = gm(x)
    # Sums are exact here and rounded in the q/dq graph: a tie may fall to the other side.
    assert sqnr_db([expected], [artifact.run(x)]) > 45
    assert sqnr_db([model(x)], [artifact.run(x)]) > 25


def test_lower_when_whole_tensors_are_quantized_at_run_time_then_kernels_do_it():
    gm, _ = canonical("int8_dynamic_per_tensor")
    artifact = ALLOWING.lower(gm)
    assert artifact.report.integer_ops == {"quantize_per_tensor": 4, "int8_linear": 4}
    assert not artifact.report.float_regions


def test_lower_when_kernels_are_unmeasured_then_refuses_unless_allowed():
    gm, _ = canonical()
    with pytest.raises(UnsupportedError, match="int8_linear was not measured on a GPU") as caught:
        BACKEND.lower(gm)
    assert "allow_unmeasured=True" in str(caught.value)
    artifact = BACKEND.lower(gm, allow_unmeasured=True)
    assert "not measured on a GPU: int8_linear, quantize" in artifact.report.notes
    assert artifact.report.notes[0].endswith("is experimental: not yet measured on a GPU")
    loose = BACKEND.lower(gm, strict=False)
    assert "int8_linear" not in loose.report.integer_ops
    weights = [i for i in loose.report.float_regions if i.what == "weight dequantize"]
    assert len(weights) == 4
    assert all("was not measured" in float_region.reason for float_region in weights)


def slower(kernel):
    return replace(
        kernel, measured={"decode": 0.8, "": 0.8, "skinny": 0.8}, shape_class=lambda m: "decode"
    )


def test_lower_when_a_kernel_measured_slower_then_leaves_float_and_says_so():
    gm, _ = canonical()
    slow = Registry(Device.CUDA, tuple(slower(kernel) for kernel in REGISTRY))
    options = {"registry": slow, "allow_unmeasured": True}
    backend = replace(BACKEND, table=table_of(slow), options=options)
    artifact = backend.lower(gm, strict=False)
    assert "int8_linear" not in artifact.report.integer_ops
    reasons = {float_region.reason for float_region in artifact.report.float_regions}
    assert "int8_linear measured 0.80 times as fast as float for such a shape" in reasons


@pytest.fixture
def slow_backend():
    """A backend all of whose kernels measured slower than float."""
    slow = Registry(Device.CUDA, tuple(slower(kernel) for kernel in REGISTRY))
    options = {"registry": slow, "allow_unmeasured": True}
    return replace(BACKEND, table=table_of(slow), policy=policy_of(slow), options=options)


def test_quantizer_when_a_kernel_measured_slower_then_leaves_float_unless_allowed(slow_backend):
    with pytest.warns(Pt2eQuantWarning, match="no tensor of this graph is to be quantized"):
        gm, _ = canonical(quantizer=slow_backend.quantizer("int8"))
    assert not provenance_of(gm).tensors
    reasons = {record.reason for record in provenance_of(gm).floats}
    assert "CUDA linear needs: a shape class that measured no slower than float here" in reasons
    with pytest.raises(ConfigError, match='has no preference "slow": did you mean "slower"'):
        slow_backend.quantizer("int8").allowing("slow")


@pytest.mark.parametrize("asked", ["option", "backend", "quantizer"])
def test_lower_when_slower_kernels_are_allowed_then_uses_them_also_after_load(
    asked, slow_backend, tmp_path
):
    allowing = slow_backend.allowing_slower()
    gm, _ = canonical(quantizer=(BACKEND if asked == "option" else allowing).quantizer("int8"))
    lowers = allowing if asked == "backend" else slow_backend
    artifact = lowers.lower(gm, allow_slower=True if asked == "option" else None)
    assert artifact.report.integer_ops["int8_linear"] == 4
    artifact.save(tmp_path / "model.qcuda")
    assert slow_backend.load(tmp_path / "model.qcuda").report.integer_ops["int8_linear"] == 4
    with pytest.warns(Pt2eQuantWarning, match="measured 0.80 times as fast as float"):
        slow_backend.load(tmp_path / "model.qcuda", allow_slower=False)


def test_lower_when_the_user_adds_a_kernel_then_it_wins_over_the_registrys():
    own = own_kernel()
    backend = ALLOWING.with_kernels(own)
    gm, _ = canonical()
    artifact = backend.lower(gm)
    assert artifact.report.integer_ops == {
        "int8_linear": 3,
        "doubled_linear": 1,
        "quantize": 2,
    }
    with pytest.raises(ConfigError, match=r"two kernels are named \['linear_gelu'\]"):
        backend.with_kernels(own)


def own_kernel() -> Kernel:
    """The registry's linear, for one activation only: what is narrower goes first."""
    base = REGISTRY.kernel("linear_activation")
    is_gelu = Constraint(
        text="gelu", holds=lambda match: match.anchor.target is torch.ops.aten.gelu.default
    )
    gelu = tuple(
        type(op)(torch.ops.aten.gelu.default, *op.args, where=lambda node: True)
        for op in base.row.find
    )
    row = replace(
        base.row, name="linear_gelu", find=gelu, constraints=(*base.row.constraints, is_gelu)
    )
    return replace(base, row=row, op="doubled_linear")


def test_artifact_when_saved_and_loaded_then_gives_the_same_result(tmp_path):
    gm, _ = canonical()
    artifact = ALLOWING.lower(gm)
    artifact.save(tmp_path / "model.qcuda")
    loaded = ALLOWING.load(tmp_path / "model.qcuda")
    x = torch.randn(5, 24)
    assert torch.equal(loaded.run(x), artifact.run(x))
    (tmp_path / "other.qcuda").write_bytes(b"no archive")
    with pytest.raises(ArtifactError, match="is no exported program"):
        ALLOWING.load(tmp_path / "other.qcuda")


def test_load_when_a_file_was_lowered_with_unmeasured_kernels_then_it_asks_for_them(tmp_path):
    gm, _ = canonical()
    artifact = BACKEND.lower(gm, allow_unmeasured=True)
    artifact.save(tmp_path / "model.qcuda")
    loaded = BACKEND.load(tmp_path / "model.qcuda")
    assert loaded.report.integer_ops == artifact.report.integer_ops
    assert loaded.report.notes == artifact.report.notes
    with pytest.warns(Pt2eQuantWarning, match="int8_linear was not measured") as caught:
        loose = BACKEND.load(tmp_path / "model.qcuda", allow_unmeasured=False)
    assert "load(..., allow_unmeasured=True)" in str(caught[0].message)
    assert caught[0].filename == __file__
    assert "int8_linear" not in loose.report.integer_ops


def test_load_when_nobody_measured_the_kernels_here_then_a_file_for_measured_ones_warns(
    tmp_path, monkeypatch
):
    gm, _ = canonical()
    monkeypatch.setattr(Measures, "ratio", lambda *_: 2.0)
    BACKEND.lower(gm).save(tmp_path / "model.qcuda")
    monkeypatch.undo()
    with pytest.warns(Pt2eQuantWarning, match="no kernel takes the quantized weight of linear"):
        BACKEND.load(tmp_path / "model.qcuda")
    allowed = BACKEND.load(tmp_path / "model.qcuda", allow_unmeasured=True)
    assert allowed.report.integer_ops["int8_linear"] == 4


def test_load_when_a_file_was_lowered_to_run_in_float_then_gives_no_warning(tmp_path):
    gm, _ = canonical()
    BACKEND.lower(gm, strict=False).save(tmp_path / "model.qcuda")
    with warnings.catch_warnings():
        warnings.simplefilter("error", Pt2eQuantWarning)
        loose = BACKEND.load(tmp_path / "model.qcuda")
    assert "int8_linear" not in loose.report.integer_ops


def test_exported_program_when_the_batch_is_dynamic_then_loads_in_torch_and_agrees(tmp_path):
    gm, _ = canonical()
    artifact = ALLOWING.lower(gm)
    torch.export.save(artifact.exported_program(), tmp_path / "fused.pt2")
    loaded = torch.export.load(tmp_path / "fused.pt2").module()
    x = torch.randn(9, 24)
    assert torch.equal(loaded(x), artifact.run(x))


def test_artifact_when_compiled_by_torch_then_gives_the_same_result():
    gm, _ = canonical("int8_dynamic")
    artifact = ALLOWING.lower(gm)
    x = torch.randn(3, 24)
    expected = artifact.run(x)
    artifact.compile(backend="aot_eager", fullgraph=True)
    assert torch.equal(artifact.run(x), expected)


def test_artifact_when_moved_to_a_device_then_the_users_tensors_stay():
    gm, model = canonical()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    artifact = ALLOWING.lower(gm).to("meta")
    assert {t.device.type for t in artifact.module.buffers()} == {"meta"}
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_artifact_when_there_is_no_gpu_then_the_error_says_so():
    artifact = ALLOWING.lower(canonical()[0])
    with pytest.raises(InputError, match="torch sees no GPU"):
        artifact.to("cuda")
    with pytest.raises(InputError, match="a CUDA graph needs a program on a GPU"):
        capture_call(artifact, torch.randn(4, 24))
    with pytest.raises(InputError, match="is on the meta device: it has no data"):
        artifact.run(torch.randn(4, 24, device="meta"))


def test_lower_when_the_quantizer_used_uint8_then_it_runs_in_int8():
    torch.manual_seed(0)
    model = Residual().eval()
    ep = torch.export.export(model, (torch.randn(4, 24),), dynamic_shapes=({0: BATCH},))
    prepared = prepare_pt2e(ep, registry.get("cpu").quantizer("int8_full"))
    calibrate(prepared, [(torch.randn(16, 24),) for _ in range(4)], progress=False)
    unsigned = convert_pt2e(prepared)
    artifact = ALLOWING.lower(unsigned)
    assert artifact.report.integer_ops["int8_linear"] == 4
    x = torch.randn(8, 24)
    assert sqnr_db([unsigned(x)], [artifact.run(x)]) > 45


def test_quantizer_when_the_recipe_is_unknown_then_the_error_offers_near_names():
    with pytest.raises(ConfigError, match='did you mean "int8_dynamic"'):
        BACKEND.quantizer("int8_dynamc")


def test_quantize_when_given_a_backend_itself_then_lowers_for_it():
    torch.manual_seed(0)
    model, x = Residual().eval(), torch.randn(4, 24)
    artifact = quantize(model, (x,), calibration_data=[x], backend=ALLOWING, progress=False)
    assert artifact.report.integer_ops == {"int8_linear": 4, "quantize": 2}


def test_artifact_when_profiled_by_torch_then_each_launch_is_a_named_range():
    artifact = ALLOWING.lower(canonical()[0])
    with torch.profiler.profile(acc_events=True) as found:
        artifact.run(torch.randn(4, 24))
    names = {event.name for event in found.events()}
    assert "pt2e_quant::int8_linear last linear_3 contiguous" in names


def test_profile_when_run_then_each_node_has_kernel_bytes_operations_and_share():
    artifact = ALLOWING.lower(canonical()[0])
    found = artifact.profile(torch.randn(4, 24))
    fused = [node for node in found.nodes if node.is_fused]
    assert [node.kernel for node in fused].count("int8_linear") == 4
    assert all(node.cost.bytes > 0 for node in fused)
    assert sum(found.share(node) for node in found.nodes) == pytest.approx(1.0)
    assert "int8_linear" in str(found)
