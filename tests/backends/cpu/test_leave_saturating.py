"""Products that are not exact without VNNI stay float, with the reason."""

import pytest
import torch
from torch import nn

import pt2e_quant as pq
from pt2e_quant.backends.cpu import leave_saturating
from pt2e_quant.kernels.onednn import exact_products

CPU = pq.backends.get("cpu")


def net():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=8), nn.SiLU(), nn.Conv2d(8, 4, 1)
    )


def converted(recipe, x):
    prepared = pq.prepare_pt2e(torch.export.export(net().eval(), (x,)), CPU.quantizer(recipe))
    return pq.convert_pt2e(pq.calibrate(prepared, [(x,)], progress=False))


def test_products_when_sums_would_be_cut_off_then_float_unless_they_fit(monkeypatch, unmeasured):
    x = torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    made = {name: converted(name, x) for name in ("int8_full", "int8_reduced", "int8")}
    for module in (leave_saturating, exact_products):
        monkeypatch.setattr(module, "onednn_is_exact", lambda: False)
    for name, gm in made.items():
        artifact = CPU.lower(gm)
        is_full = name == "int8_full"
        # Depthwise kernels add in 32 bits.
        assert artifact.report.integer_ops["onednn.qconv_pointwise"] == (1 if is_full else 3)
        found = [r for r in artifact.report.float_regions if "pair_scales" in r.reason]
        assert [region.node for region in found] == (["conv2d", "conv2d_2"] if is_full else [])
        assert pq.sqnr_db(gm(x), artifact.run(x)) > 40


def test_file_when_loaded_where_sums_would_be_cut_off_then_float(monkeypatch, unmeasured, tmp_path):
    x = torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    gm = converted("int8_full", x)
    CPU.lower(gm).save(tmp_path / "net.qpt2")
    for module in (leave_saturating, exact_products):
        monkeypatch.setattr(module, "onednn_is_exact", lambda: False)
    loaded = CPU.load(tmp_path / "net.qpt2")
    assert len([r for r in loaded.report.float_regions if "pair_scales" in r.reason]) == 2
    assert pq.sqnr_db(gm(x), loaded.run(x)) > 40


def test_linear_when_one_scale_is_found_at_run_time_then_float(monkeypatch):
    module = pytest.importorskip("executorch.backends.xnnpack.quantizer.xnnpack_quantizer")
    config = module.get_symmetric_quantization_config(is_per_channel=True, is_dynamic=True)
    x = torch.rand(20, 64, generator=torch.Generator().manual_seed(1))
    ep = torch.export.export(nn.Linear(64, 16).eval(), (x,))
    prepared = pq.prepare_pt2e(ep, module.XNNPACKQuantizer().set_global(config))
    gm = pq.convert_pt2e(pq.calibrate(prepared, [(x,)], progress=False))
    for module in (leave_saturating, exact_products):
        monkeypatch.setattr(module, "onednn_is_exact", lambda: False)
    artifact = CPU.allowing_slower().lower(gm, verify=False)
    # No kernel of codes takes them: they would run as rows in limbs, which are cut off as well.
    assert "pt2e_quant.linear_of_limbs" not in artifact.report.integer_ops
    assert pq.sqnr_db(gm(x), artifact.run(x)) > 100
