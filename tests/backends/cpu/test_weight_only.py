"""Weight-only recipes of the CPU backend: fused, near the graph, any batch, saved and exported."""

import io

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from pt2e_quant.backends import get
from pt2e_quant.backends.cpu import leave_saturating, policy
from pt2e_quant.backends.cpu.table import TABLE
from pt2e_quant.core.errors import AnnotationError, ConfigError, Pt2eQuantWarning
from pt2e_quant.core.provenance import provenance_of
from pt2e_quant.core.scheme_names import scheme_named
from pt2e_quant.flow.annotate.table_quantizer import TableQuantizer
from pt2e_quant.flow.calibrate.sample import sqnr_db
from pt2e_quant.flow.convert.convert_pt2e import convert_pt2e
from pt2e_quant.flow.prepare.prepare_pt2e import prepare_pt2e
from pt2e_quant.kernels.grouped_weight import read_grouped_weight
from pt2e_quant.kernels.int4_linear import few_rows_op
from pt2e_quant.kernels.onednn import exact_products, limbs_op, limbs_site
from tests.needs_vnni import NEEDS_VNNI
from tests.small_models import MODELS

CPU = get("cpu")
DIGITS, FEW = "pt2e_quant.linear_of_limbs", "pt2e_quant.linear_of_int4"
RECIPES = ["w8", "w4", "w4_g32"]
# 16 bits of the largest in a row, and 8 of each value.
LEAST_DB = {DIGITS: 75.0, FEW: 40.0}
BATCH = ({0: torch.export.Dim("n", max=64)},)

pytestmark = [
    pytest.mark.usefixtures("unmeasured"),
    NEEDS_VNNI,
]


def converted(model, inputs, quantizer, shapes=None):
    ep = torch.export.export(model.eval(), inputs, dynamic_shapes=shapes)
    return convert_pt2e(prepare_pt2e(ep, quantizer))


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 20, bias=False))


def lowered_net(recipe, *shape, shapes=None):
    gm = converted(net(), (torch.randn(*shape),), CPU.quantizer(recipe), shapes)
    return gm, CPU.lower(gm)


@pytest.mark.parametrize("recipe", RECIPES)
def test_llama_when_lowered_then_every_linear_fused_and_the_same_after_a_file(recipe, tmp_path):
    make, batches = MODELS["llama"]
    model, (first, *rest) = make(), batches()
    artifact = CPU.lower(converted(model, first, CPU.quantizer(recipe)))
    report = artifact.report
    assert report.integer_ops == {DIGITS: sum(isinstance(m, nn.Linear) for m in model.modules())}
    assert not report.float_regions
    assert report.sqnr_canonical_db >= 60  # where later layers see what the first ones rounded
    artifact.save(tmp_path / "llama.qpt2")
    again = CPU.load(tmp_path / "llama.qpt2")
    assert torch.equal(again.run(*rest[0]), artifact.run(*rest[0]))


@pytest.mark.parametrize("recipe", [*RECIPES, "w4_g64", "w4_g128"])
def test_recipe_when_lowered_then_its_weights_and_no_calibration(recipe):
    model, x = nn.Sequential(nn.Linear(128, 32)), torch.randn(5, 128)
    gm = converted(model, (x,), CPU.quantizer(recipe))
    (record,) = provenance_of(gm).tensors
    assert record.dtype == ("int8" if recipe == "w8" else "int4")
    artifact = CPU.lower(gm)
    assert artifact.report.integer_ops == {DIGITS: 1}
    assert artifact.report.sqnr_canonical_db >= LEAST_DB[DIGITS]


@pytest.mark.parametrize("recipe", RECIPES)
def test_any_batch_when_run_then_near_the_graph(recipe):
    gm, artifact = lowered_net(recipe, 3, 5, 64, shapes=BATCH)
    for n in (1, 2, 17):
        x = torch.randn(n, 5, 64)
        with torch.no_grad():
            torch.testing.assert_close(artifact.run(x), gm(x), rtol=0, atol=3e-4)


def test_groups_when_rows_are_unknown_then_the_form_that_their_number_asks_for():
    gm, artifact = lowered_net("w4_g32", 9, 64, shapes=BATCH)
    assert artifact.report.integer_ops == {"pt2e_quant.linear_of_groups": 2}
    x = torch.randn(9, 64)
    with torch.no_grad():
        wanted = gm(x)
        many, few = artifact.run(x), torch.cat([artifact.run(x[:4]), artifact.run(x[4:8])])
    assert sqnr_db([wanted], [many]) >= LEAST_DB[DIGITS]
    assert LEAST_DB[FEW] <= sqnr_db([wanted[:8]], [few]) < LEAST_DB[DIGITS]


@pytest.mark.parametrize(("rows", "name"), [(1, FEW), (4, FEW), (5, DIGITS)])
def test_groups_when_rows_are_few_then_torchs_packed_product(rows, name):
    _, artifact = lowered_net("w4_g32", rows, 64)
    assert artifact.report.integer_ops == {name: 2}
    assert artifact.report.sqnr_canonical_db >= LEAST_DB[name]


@settings(max_examples=12)
@given(
    st.sampled_from([1, 4, 5, 19]),
    st.sampled_from([1, 16, 33]),
    st.sampled_from([32, 96, 128, 320]),
    st.sampled_from([("w8", True), ("w4", True), ("w4", False), ("w4_g32", True)]),
    st.booleans(),
)
def test_linear_when_of_any_size_then_it_is_within_the_bound_of_the_graph(
    rows, N, K, named, has_bias
):
    scheme = scheme_named(named[0], symmetric=named[1])
    check_bound(rows, N, K, scheme, has_bias)


@settings(max_examples=8)
@given(
    st.sampled_from([2, 7]),
    st.sampled_from([1, 33]),
    st.sampled_from([("w4_g32", 96), ("w4_g64", 192), ("w4_g128", 256)]),
)
def test_linear_when_groups_have_zero_points_then_it_is_within_the_bound_of_the_graph(
    rows, N, named
):
    name, K = named
    check_bound(rows, N, K, scheme_named(name, symmetric=False), has_bias=True)


def check_bound(rows, N, K, scheme, has_bias):
    """A lone linear against float64 sums of the weight that the graph dequantizes."""
    torch.manual_seed(rows + N + K)
    model = nn.Linear(K, N, bias=has_bias).requires_grad_(False)
    model.weight += 0.1 / K**0.5  # zero points that are not in the middle
    x = torch.randn(rows, K)
    gm = converted(model, (x,), TableQuantizer(TABLE, scheme))
    linear = next(n for n in gm.graph.nodes if n.target is torch.ops.aten.linear.default)
    weight = read_grouped_weight(gm, linear.args[1])
    offset = 8 if weight.integers.dtype is torch.int8 else 0
    zeros = 0 if weight.zero_point is None else weight.zero_point
    zeros = torch.zeros_like(weight.scale, dtype=torch.int32) + zeros
    steps = weight.integers.double() - zeros.repeat_interleave(weight.group_size, 1)
    real = steps * weight.scale.double().repeat_interleave(weight.group_size, 1)
    artifact = CPU.lower(gm, verify=False)
    if FEW in artifact.report.integer_ops:
        codes = (weight.integers.int() + offset).to(torch.uint8)
        bound = few_rows_op.error_bound(x, codes, weight.scale, zeros + offset, model.bias)
    else:
        bound = limbs_op.error_bound(x, real, model.bias, low=weight.group_size < K)
    exact = x.double() @ real.t() + (model.bias.double() if has_bias else 0)
    assert ((artifact.run(x) - exact).abs() <= bound).all()


@pytest.mark.parametrize("recipe", RECIPES)
def test_program_when_exported_saved_and_traced_then_the_same_results(recipe):
    _, artifact = lowered_net(recipe, 3, 5, 64, shapes=BATCH)
    stream = io.BytesIO()
    torch.export.save(artifact.exported_program(), stream)
    stream.seek(0)
    exported = torch.export.load(stream).module()
    compiled = torch.compile(artifact.program, backend="aot_eager", fullgraph=True)
    x = torch.randn(2, 5, 64)
    with torch.no_grad():
        expected = artifact.run(x)
        assert torch.equal(exported(x), expected)
        assert torch.equal(compiled(x), expected)
    torch._dynamo.reset()


@pytest.mark.slow  # compiles C++
@pytest.mark.filterwarnings("ignore")  # torch's own, at compilation
@pytest.mark.parametrize(("recipe", "shape"), [("w8", (3, 5, 64)), ("w4_g32", (1, 64))])
def test_artifact_when_compiled_then_near_the_module(recipe, shape, tmp_path):
    is_dynamic = len(shape) == 3
    _, artifact = lowered_net(recipe, *shape, shapes=BATCH if is_dynamic else None)
    batches = [torch.randn(n, *shape[1:]) for n in ((1, 7) if is_dynamic else (1,))]
    expected = [artifact.run(x) for x in batches]
    artifact.compile(tmp_path / "net.pt2")
    for x, wanted in zip(batches, expected, strict=True):
        torch.testing.assert_close(artifact.run(x), wanted, rtol=0, atol=1e-4)


def test_gradients_when_on_then_the_same_result():
    _, artifact = lowered_net("w8", 3, 64)
    x = torch.randn(3, 64, requires_grad=True)
    assert torch.equal(artifact.module(x).detach(), artifact.run(x.detach()))


def test_run_when_a_profiler_watches_then_a_range_for_each_linear():
    _, artifact = lowered_net("w4_g32", 1, 64)
    with torch.profiler.profile() as watched:
        artifact.run(torch.randn(1, 64))
    names = [event.key for event in watched.key_averages()]
    assert sum(name.startswith("pt2e_quant::int4_linear ") for name in names) == 2
    costs = [node.cost for node in artifact.profile(torch.randn(1, 64)).nodes if node.is_fused]
    assert [cost.operations for cost in costs] == [2 * 64 * 96, 2 * 96 * 20]


def test_class_when_slower_than_float_then_it_stays_float_with_the_reason(monkeypatch):
    slow = {limbs_site.class_of("rows", 3, 64 * 96): 0.8}
    monkeypatch.setattr(policy, "measured_here", lambda op: slow)
    with pytest.warns(Pt2eQuantWarning, match="measured no slower than float"):
        _, artifact = lowered_net("w8", 3, 64)
    assert not [op for op in artifact.report.integer_ops if "limbs" in op]


def test_class_when_slower_but_quantized_already_then_fused(monkeypatch):
    gm, _ = lowered_net("w8", 3, 64)
    slow = {limbs_site.class_of("rows", 3, 64 * 96): 0.8}
    monkeypatch.setattr(policy, "measured_here", lambda op: slow)
    assert CPU.lower(gm).report.integer_ops == {DIGITS: 2}


def test_bfloat16_model_when_kept_in_its_dtype_then_refused_with_the_reason():
    quantizer = CPU.quantizer("w8")
    quantizer.computes_in = None
    with pytest.raises(AnnotationError, match="float32 activations"):
        converted(net().bfloat16(), (torch.randn(3, 64).bfloat16(),), quantizer)


def test_machine_without_vnni_when_lowered_then_float_with_the_reason(monkeypatch):
    gm, artifact = lowered_net("w8", 3, 64)
    for module in (leave_saturating, exact_products):
        monkeypatch.setattr(module, "onednn_is_exact", lambda: False)
    plain = CPU.lower(gm)
    assert plain.report.integer_ops == {}
    assert all("no VNNI" in region.reason for region in plain.report.float_regions)
    x = torch.randn(3, 64)
    assert sqnr_db(plain.run(x), artifact.run(x)) > 60


def test_quantizer_when_groups_do_not_divide_a_weight_then_the_error_names_their_size():
    with pytest.raises(AnnotationError, match="32"):
        converted(nn.Sequential(nn.Linear(40, 8)), (torch.randn(2, 40),), CPU.quantizer("w4_g32"))


@pytest.mark.parametrize(
    ("scheme", "nearest"),
    [("w3", "w4"), ("w4_g256", "w4_g128"), ("w5_g64", "w8"), ("a8w4_g32", "w4_g32")],
)
def test_scheme_without_a_winning_kernel_when_asked_for_then_the_nearest(scheme, nearest):
    with pytest.raises(ConfigError, match=f'CPU has no kernel for scheme "{scheme}"') as caught:
        CPU.quantizer(scheme)
    assert f'the nearest recipe it runs is "{nearest}"' in str(caught.value)
