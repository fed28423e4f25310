"""Indices into tables: which values an input may have, and calls with others."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim

import pt2e_quant as pq
from pt2e_quant.core.capture import Capture
from pt2e_quant.core.errors import InputError
from pt2e_quant.core.read_capture import capture_of

IDS = torch.tensor([[3, 1, 4], [1, 0, 2]])


class Reads(nn.Module):
    """A computation with integers, and a table of 6 rows of 8."""

    def __init__(self, read):
        super().__init__()
        self.read = read
        self.table = nn.Parameter(torch.randn(6, 8, generator=torch.Generator().manual_seed(0)))

    def forward(self, ids):
        return self.read(ids, self.table)


READS = {
    "embedding": (lambda ids, t: F.embedding(ids, t), (0, 5)),
    "of a row": (lambda ids, t: F.embedding(ids.flatten().to(torch.int32), t[:6]), (0, 5)),
    "index_select": (lambda ids, t: t.index_select(1, ids.reshape(-1)), (0, 7)),
    "gather of a part": (lambda ids, t: t.gather(0, ids.unsqueeze(-1)[0].expand(3, 8)), None),
    "gather of all": (lambda ids, t: t.gather(-2, ids.t()), (0, 5)),
    "index": (lambda ids, t: t[ids], (-6, 5)),
    "two tables": (lambda ids, t: t[:, ids].sum() + F.embedding(ids, t[:5]), (0, 4)),
    "clamped": (lambda ids, t: F.embedding(ids.clamp(0, 5), t), None),
    "a part": (lambda ids, t: F.embedding(ids[:, :1], t), None),
    "in float": (lambda ids, t: ids.float() @ t[:3], None),
}


@pytest.mark.parametrize("name", READS)
def test_capture_when_a_graph_looks_up_rows_then_its_inputs_have_their_range(name):
    read, expected = READS[name]
    capture = capture_of(torch.export.export(Reads(read), (IDS,)).module())
    assert capture.inputs[0].indices == expected
    assert Capture.from_json(capture.to_json()).inputs == capture.inputs
    capture.bind((IDS,))
    if expected is not None:
        low, high = expected
        capture.bind((torch.tensor([[low] * 3, [high] * 3]),))
        for wrong in (low - 1, high + 1):
            with pytest.raises(InputError, match=f"looks up rows {low} to {high}"):
                capture.bind((IDS.clone().index_fill_(1, torch.tensor([2]), wrong),))


class Text(nn.Module):
    """Words and their positions, as language models read them."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.places = nn.Embedding(50, 64), nn.Embedding(16, 64)
        self.layer = nn.Linear(64, 64)

    def forward(self, ids, positions):
        return self.layer(self.words(ids) + self.places(positions))


@pytest.mark.parametrize("backend", ["onnx", "xnnpack", "cpu"])
def test_artifact_when_an_index_is_outside_its_table_then_every_call_is_refused(backend, tmp_path):
    target = pq.backends.get(backend)
    ids, positions = torch.randint(0, 50, (2, 8)), torch.arange(8).expand(2, -1).contiguous()
    # Nothing bounds the length but the table of positions, which count up as far as sizes go.
    length = Dim("length", min=2, max=64)
    artifact = pq.quantize(
        Text().eval(),
        (ids, positions),
        dynamic_shapes={"ids": {1: length}, "positions": {1: length}},
        calibration_data=[(ids, positions)],
        backend=target,
        progress=False,
    )
    artifact.save(path := tmp_path / f"text{target.suffix}")
    for each in (artifact, target.load(path)):
        for _ in range(2):
            assert each.run(ids, positions).shape == (2, 8, 64)
            for wrong in (50, -1):
                with pytest.raises(InputError, match=r'"ids" has values .* looks up rows 0 to 49'):
                    each.run(ids.clone().fill_(wrong), positions)
            with pytest.raises(InputError, match='"positions" has values from 9 to 16'):
                each.run(ids, positions + 9)
