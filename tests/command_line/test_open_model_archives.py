import json
import re
from dataclasses import asdict

import pytest
import torch
from torch import nn
from torch.export import Dim, export
from typer.testing import CliRunner

import pt2e_quant as pq
from pt2e_quant.command_line.analysis_commands import COMMANDS
from pt2e_quant.command_line.open_model import open_model
from pt2e_quant.core.errors import ArtifactError


@pytest.fixture
def prepared(plain_backend):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16)).eval()
    shapes = ({0: Dim("b", min=1, max=8)},)
    program = export(model, (torch.randn(2, 16),), dynamic_shapes=shapes)
    return pq.prepare_pt2e(program, plain_backend.quantizer())


def test_inspect_when_converted_then_the_table_and_the_ledger(prepared, tmp_path):
    path = tmp_path / "model.ptq"
    gm = pq.convert_pt2e(pq.calibrate(prepared, [torch.randn(2, 16)], progress=False))
    pq.save(gm, path)
    shown = CliRunner().invoke(COMMANDS, ["inspect", str(path)])
    assert shown.exit_code == 0
    assert "converted program" in shown.output
    assert re.search(r"0\.weight .*int8.* 4,096 -> 1,024", shown.output)
    as_json = json.loads(CliRunner().invoke(COMMANDS, ["inspect", "--json", str(path)]).output)
    records = [asdict(record) for record in pq.provenance_of(gm).tensors]
    assert as_json["provenance"]["tensors"] == json.loads(json.dumps(records))
    assert as_json["size_bytes"] == path.stat().st_size


class Cumulative(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.cumprod(self.first(x), 0))


def test_audit_when_converted_then_the_float_operators(plain_backend, tmp_path):
    program = export(Cumulative().eval(), (torch.randn(2, 16),))
    prepared = pq.prepare_pt2e(program, plain_backend.quantizer())
    path = tmp_path / "model.ptq"
    gm = pq.convert_pt2e(pq.calibrate(prepared, [torch.randn(2, 16)], progress=False))
    pq.save(gm, path)
    shown = CliRunner().invoke(COMMANDS, ["audit", str(path)])
    assert shown.exit_code == 0
    assert "aten.cumprod has no integer form" in shown.output
    found = json.loads(CliRunner().invoke(COMMANDS, ["audit", "--json", str(path)]).output)
    assert [operator["operator"] for operator in found["islands"]] == ["aten.cumprod"]


def test_inspect_when_prepared_then_its_observers(prepared, tmp_path):
    path = tmp_path / "half.ptq"
    pq.save(prepared, path)
    shown = CliRunner().invoke(COMMANDS, ["inspect", str(path)])
    assert "prepared program" in shown.output
    assert re.search(r"note: \d+ observers, \d of them have seen data", shown.output)


def test_run_when_saved_then_as_the_program(prepared, tmp_path):
    gm = pq.convert_pt2e(pq.calibrate(prepared, [torch.randn(2, 16)], progress=False))
    pq.save(gm, tmp_path / "m.any_suffix", shard_bytes=1000)
    model = open_model(tmp_path / "m.any_suffix")
    x = torch.randn(5, 16)
    assert torch.equal(model.run_leaves(model.capture.bind((x,)))[0], gm(x))
    files = sum(p.stat().st_size for p in tmp_path.iterdir())
    assert model.report.size_bytes == files > (tmp_path / "m.any_suffix").stat().st_size


def test_inspect_when_damaged_then_says_so(prepared, tmp_path):
    path = tmp_path / "model.ptq"
    pq.save(prepared, path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ArtifactError, match="is damaged"):
        open_model(path)
