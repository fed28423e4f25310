"""Every row of the op table with a result that several read: as integers, in float, as output.

Rows are lowered together, a group in one model for each kind of readers, and compared one by one.
"""

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("onnxruntime", reason="the extra onnx is not installed")

import pt2e_quant as pq
from pt2e_quant.flow.calibrate.sample import sqnr_db
from tests.backends.onnx.test_table import GROUPS, Branches

KINDS = ("second", "float", "output")
READERS = ("integers and output", "integers twice", "integers and float", "all")


class Read(nn.Module):
    """The branches of a group, each result read by linears, a sine, and as an output."""

    def __init__(self, group: str, readers: str, image: Tensor) -> None:
        super().__init__()
        self.readers = readers
        self.rows = Branches({name: branch for name, (branch, _) in GROUPS[group].items()})
        with torch.no_grad():
            widths = [flat(h).shape[-1] for h in self.rows(image).values()]
        self.first = nn.ModuleList(nn.Linear(width, 4) for width in widths)
        self.second = nn.ModuleList(nn.Linear(width, 4, bias=False) for width in widths)

    def forward(self, image: Tensor) -> dict[str, Tensor]:
        found = {}
        for index, (name, h) in enumerate(self.rows(image).items()):
            found[name] = self.first[index](flat(h))
            if self.readers in ("integers twice", "all"):
                found[f"{name} second"] = self.second[index](flat(h))
            if self.readers in ("integers and float", "all"):
                found[f"{name} float"] = torch.sin(h)
            if self.readers in ("integers and output", "all"):
                found[f"{name} output"] = h
        return found


def flat(h: Tensor) -> Tensor:
    return h.flatten(2) if h.dim() > 3 else h


@cache
def lowered(group: str, readers: str) -> tuple[dict[str, Tensor], dict[str, Tensor], Any]:
    """What the q/dq graph and the artifact give for an image, and the report."""
    torch.manual_seed(0)
    images = [torch.randn(3, 3, 8, 8) for _ in range(2)]
    model = Read(group, readers, images[0]).eval()
    options: dict[str, Any] = {"recipe": "int8", "progress": False}
    data = [(image,) for image in images]
    backend = pq.backends.get("onnx").allowing_slower()
    artifact = pq.quantize(model, data[0], calibration_data=data, backend=backend, **options)
    prepared = pq.prepare_pt2e(torch.export.export(model, data[0]), backend.quantizer())
    pq.calibrate(prepared, data, progress=False)
    return pq.convert_pt2e(prepared)(images[0]), artifact.run(images[0]), artifact.report


def is_quick(group: str, readers: str) -> bool:
    """Of rows whose results are quantized all kinds of readers read one dequantize."""
    return group == "linears" or readers == "all"


CASES = [
    pytest.param(group, name, kind, marks=() if is_quick(group, kind) else pytest.mark.slow)
    for group, rows in GROUPS.items()
    for name in rows
    for kind in READERS
]


@pytest.mark.parametrize(("group", "name", "readers"), CASES)
def test_row_when_several_read_its_result_then_as_in_the_graph(
    group: str, name: str, readers: str
) -> None:
    expected, found, report = lowered(group, readers)
    names = [key for key in expected if key in (name, *(f"{name} {r}" for r in KINDS))]
    assert len(names) == (4 if readers == "all" else 2)
    for key in names:
        assert sqnr_db(expected[key], found[key]) > 40, key
    assert not [i for i in report.float_regions if "weight" in i.reason]
