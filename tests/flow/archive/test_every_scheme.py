"""Every scheme through pack, save and load: the same numbers, in as few bits as it says."""

import pytest
import torch
from torch import nn

import pt2e_quant as pq
from pt2e_quant.core.formats.format_schemes import FORMAT_SCHEMES
from pt2e_quant.core.provenance import provenance_of
from pt2e_quant.core.scheme_names import scheme_named
from pt2e_quant.core.schemes import Role
from pt2e_quant.core.unpack_op import is_unpack
from pt2e_quant.flow.annotate.table_quantizer import TableQuantizer
from pt2e_quant.graph import ops
from pt2e_quant.graph.op_table import OpRow, OpTable, Slot
from pt2e_quant.graph.pattern import Op, Var
from pt2e_quant.graph.show import show

# Bits of a weight's own codes; a table for each row of 256 weights outgrows lut7 and lut8.
BITS = {
    **{f"w{bits}": bits for bits in range(2, 9)},
    **{f"w{bits}_g32": bits for bits in range(2, 9)},
    "w4_g128": 4, "a8w4_g32": 4, "int8_dynamic": 8, "nf4_g32": 4, "w1_g32": 1, "lut3_g64": 3,
    **{name: 8 for name in FORMAT_SCHEMES if name not in ("lut7", "lut8")},
    "nf4": 4, "mxfp4": 4, "nvfp4": 4, "fp4_weight_only": 4, "mxfp6": 6, "fp6_weight_only": 6,
    "w1": 1, "lut4": 4, "lut2": 2,
}  # fmt: skip


def program(name: str):
    scheme = scheme_named(name)
    slots = (
        Slot(at="x", role=Role.INPUT, accepts=(scheme.input,) if scheme.input else ()),
        Slot(at="w", role=Role.WEIGHT, accepts=(scheme.weight,)),
    )
    find = (Op(ops.LINEAR, Var("x"), Var("w")),)
    table = OpTable(
        backend="Toy", rows=(OpRow(name="linear", find=find, slots=slots, lowers_to="x"),)
    )
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 128), nn.GELU(), nn.Linear(128, 128, bias=False)).eval()
    x = torch.randn(4, 256)
    dims = ({0: torch.export.Dim("n", max=64)},)
    exported = torch.export.export(model, (x,), dynamic_shapes=dims)
    prepared = pq.prepare_pt2e(exported, TableQuantizer(table, scheme))
    return pq.calibrate(prepared, [x], progress=False), x


@pytest.mark.parametrize("name", BITS)
def test_save_when_any_scheme_then_the_same_program_and_its_bits(name, tmp_path):
    prepared, x = program(name)
    pq.save(prepared, tmp_path / "prepared.ptq")
    resumed = pq.convert_pt2e(pq.load(tmp_path / "prepared.ptq"))
    gm = pq.convert_pt2e(prepared)
    assert torch.equal(resumed(x), gm(x))
    assert show(resumed) == show(gm)
    pq.save(gm, tmp_path / "converted.ptq")
    loaded = pq.load(tmp_path / "converted.ptq", mmap=True)
    assert torch.equal(loaded(x), gm(x))
    assert provenance_of(loaded) == provenance_of(gm)
    for key, value in gm.state_dict().items():
        assert value.dtype == loaded.state_dict()[key].dtype
    weights = [r for r in provenance_of(gm).sizes if r.readers]
    for row in weights:
        assert row.size_after * 8 <= BITS[name] * row.elements
    if BITS[name] < 8:
        assert all(row.dtype.endswith(f"int{BITS[name]}") for row in weights)
        assert sum(is_unpack(n) for n in gm.graph.nodes) >= len(weights)
