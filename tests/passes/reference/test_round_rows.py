"""The integer reference rounds rows with scales of run time as its profile's runtime does."""

import pytest
import torch
from torch import nn

import pt2e_quant as pq
from pt2e_quant.core.qdq import CHOOSE_QPARAMS_OPS
from pt2e_quant.graph.show import show


def rows_on_ties():
    """Rows whose values are multiples of a part of their range: many lie on ties."""
    generator = torch.Generator().manual_seed(1)
    widths = torch.randint(1, 300, (128, 1), generator=generator)
    steps = torch.randint(0, 100_000, (128, 64), generator=generator) % widths
    return (steps - widths // 3).float() * 0.0123 / 4


def quantized(backend, x):
    torch.manual_seed(0)
    rows = torch.export.Dim("rows", min=1, max=4096)
    program = torch.export.export(nn.Linear(64, 64).eval(), (x,), dynamic_shapes=({0: rows},))
    target = pq.backends.get(backend).allowing_slower()
    return pq.convert_pt2e(pq.prepare_pt2e(program, target.quantizer("int8_dynamic")))


@pytest.mark.parametrize(("backend", "least"), [("onnx", 1.0), ("xnnpack", 0.9995), ("cpu", 1.0)])
def test_rows_on_ties_when_run_then_the_integers_of_the_runtime(backend, least):
    package = {"xnnpack": "executorch", "onnx": "onnxruntime"}.get(backend)
    if package:
        pytest.importorskip(package)
    x = rows_on_ties()
    gm = quantized(backend, x)
    artifact = pq.backends.get(backend).allowing_slower().lower(gm, verify=False, strict=False)
    found = pq.verify_parity(artifact, [x, x[:1]])
    # XNNPACK's compiler may compute the inverse of a scale a bit beside the exact one.
    assert found.share_equal >= least
    assert found.most_steps <= 1
    if backend != "cpu":
        other = pq.verify_parity(artifact, [x], profile="default")
        assert other.share_equal < found.share_equal


def test_one_row_when_run_by_onnx_runtime_then_the_integers_of_its_operator_for_that():
    pytest.importorskip("onnxruntime")
    rows = list(rows_on_ties()[:40].split(1))
    torch.manual_seed(0)
    target = pq.backends.get("onnx")
    program = torch.export.export(nn.Linear(64, 64).eval(), (rows[0],))
    gm = pq.convert_pt2e(pq.prepare_pt2e(program, target.quantizer("int8_dynamic")))
    artifact = target.lower(gm, verify=False, strict=False)
    rows += [rows[0].abs(), -rows[1].abs(), torch.zeros(1, 64)]
    found = pq.verify_parity(artifact, rows)
    assert (found.share_equal, found.most_steps) == (1.0, 0.0)


def test_pass_when_the_profile_is_of_a_runtime_then_no_operator_per_token_is_left():
    x = rows_on_ties()
    gm = quantized("cpu", x)
    kept = pq.integer_reference(gm)
    assert any(node.target in CHOOSE_QPARAMS_OPS for node in kept.graph.nodes)
    written = pq.integer_reference(gm, "xnnpack")
    assert "per_token" not in show(written)
    # At most a step of each value of the row apart, at ties.
    step = (x.amax(1, keepdim=True).clamp(min=0) - x.amin(1, keepdim=True).clamp(max=0)) / 255
    weight = gm.get_buffer("weight_q") * gm.get_buffer("weight_scale")[:, None]
    apart = (written(x) - kept(x)).abs()
    assert 0 < apart.max() < 0.01
    assert (apart <= 1.001 * step * weight.abs().sum(1)).all()
    assert torch.isfinite(written(torch.zeros(3, 64))).all()
