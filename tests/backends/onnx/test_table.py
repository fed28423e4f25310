"""Every row of the op table, lowered and run: its operator is there in integers, nothing is left.

Rows are lowered together, a group in one model, and asked about one by one.
"""

import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("onnxruntime", reason="the extra onnx is not installed")

import pt2e_quant as pq
from pt2e_quant.backends.onnx.code_rows import CODE_ROWS
from pt2e_quant.backends.onnx.low_bit_rows import LOW_BIT_ROWS
from pt2e_quant.backends.onnx.table import TABLE
from pt2e_quant.passes.cleanup.linear_forms import products_as_linears

sys.path.insert(0, str(Path(__file__).parent))

from op_branches import GROUPS, Branches


@cache
def lowered(group: str, is_dynamic: bool) -> tuple[Any, Any]:
    """(canonical graph, artifact) of a group, its batch dynamic or not."""
    torch.manual_seed(0)
    model = Branches({name: branch for name, (branch, _) in GROUPS[group].items()}).eval()
    images = [torch.randn(3, 3, 8, 8) for _ in range(2)]
    batch = torch.export.Dim("batch", min=1, max=64)
    shapes = {"image": {0: batch}} if is_dynamic else None
    ep = torch.export.export(model, (images[0],), dynamic_shapes=shapes)
    backend = pq.backends.get("onnx")
    # The table's own operators: linears on pooled features would take their scales at run time.
    quantizer = backend.quantizer().remove_algorithm("run_time_scales").allowing("slower")
    # And products by a matrix stay as they are written, for a quantizer of one's own.
    quantizer.transforms = tuple(t for t in quantizer.transforms if t is not products_as_linears)
    prepared = pq.prepare_pt2e(ep, quantizer)
    pq.calibrate(prepared, [(image,) for image in images], progress=False)
    quantized = pq.convert_pt2e(prepared)
    return quantized, backend.lower(quantized)


ALL = [(group, name) for group, rows in GROUPS.items() for name in rows]


@pytest.mark.parametrize("is_dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize(("group", "name"), ALL)
def test_row_when_lowered_then_its_operator_runs_in_integers(
    group: str, name: str, is_dynamic: bool
) -> None:
    _, artifact = lowered(group, is_dynamic)
    expected = GROUPS[group][name][1]
    report = artifact.report
    assert report.float_regions == []
    found = report.integer_ops | {"DequantizeLinear": 1}
    assert any(op in (expected, f"Nhwc{expected}") for op in found), found
    row = name.split()[0]
    assert any(f"(row {row})" in record.rule for record in report.provenance.tensors)


@pytest.mark.parametrize("batch", [1, 3, 6])
@pytest.mark.parametrize("group", GROUPS)
def test_group_when_run_at_several_sizes_then_each_output_is_within_a_step(
    group: str, batch: int
) -> None:
    quantized, artifact = lowered(group, True)
    image = torch.randn(batch, 3, 8, 8, generator=torch.Generator().manual_seed(batch))
    expected, found = quantized(image), artifact.run(image)
    steps = {r.name: r.scale[0] for r in artifact.report.provenance.tensors if r.scale}
    error_lsb = max(steps.values())
    for name in expected:
        assert found[name].shape == expected[name].shape
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=1.01 * error_lsb)


@pytest.mark.parametrize("group", ["convs", "arithmetic", "moving"])
def test_group_when_lowered_then_no_operator_is_left_in_float(group: str) -> None:
    _, artifact = lowered(group, True)
    assert artifact.report.float_ops == {}


def test_embedding_when_lowered_then_rows_are_found_in_integers() -> None:
    class Embed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(1000, 64)
            self.linear = nn.Linear(64, 16)

        def forward(self, ids: Tensor) -> Tensor:
            return self.linear(self.table(ids))

    ids = torch.randint(0, 1000, (2, 5), generator=torch.Generator().manual_seed(0))
    shapes = {"ids": {0: torch.export.Dim("n", max=8), 1: torch.export.Dim("t", max=64)}}
    ep = torch.export.export(Embed().eval(), (ids,), dynamic_shapes=shapes)
    backend = pq.backends.get("onnx")
    prepared = pq.prepare_pt2e(ep, backend.quantizer().allowing("slower"))
    pq.calibrate(prepared, [(ids,)], progress=False)
    quantized = pq.convert_pt2e(prepared)
    artifact = backend.lower(quantized)
    assert artifact.report.float_regions == []
    assert artifact.report.integer_ops["Gather"] == 1
    assert artifact.size_bytes < 0.3 * artifact.report.float_size_bytes
    for shape in ((1, 3), (4, 9)):
        ids = torch.randint(0, 1000, shape)
        torch.testing.assert_close(artifact.run(ids), quantized(ids), rtol=1e-5, atol=1e-5)


def test_table_when_listed_then_every_row_is_proven_here() -> None:
    proven = {name.split()[0] for rows in GROUPS.values() for name in rows} | {"embedding"}
    elsewhere = {
        row.name for row in (*LOW_BIT_ROWS, *CODE_ROWS)
    }  # test_low_bit.py, test_every_format.py
    elsewhere |= {"recurrent_layer"}  # tests/backends/test_recurrent_models.py
    elsewhere |= {row.name for row in TABLE if row.name.endswith("_16")}  # test_sixteen_bit.py
    assert {row.name for row in TABLE} == proven | elsewhere
