"""A table that the delegate and a lookup both read is in the file once, in equal integers."""

import pytest
import torch
from torch import Tensor, nn

import pt2e_quant as pq
from pt2e_quant.accelerate.patch import VARIABLE
from pt2e_quant.accelerate.share_constants import PATCH, share_constants
from pt2e_quant.backends.xnnpack.artifact import XnnpackArtifact
from pt2e_quant.backends.xnnpack.backend import BACKEND
from pt2e_quant.backends.xnnpack.contents import read_contents, read_named_data

ROWS, WIDTH = 500, 64


class Tied(nn.Module):
    """A language model's ends, with a buffer that each call writes."""

    def __init__(self, *, tied: bool = True) -> None:
        super().__init__()
        self.table, self.middle = nn.Embedding(ROWS, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, ROWS, bias=False)
        if tied:
            self.head.weight = self.table.weight
        self.register_buffer("seen", torch.zeros(2, WIDTH))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.middle(self.table(ids))
        self.seen.add_(x)
        return self.head(torch.relu(x) + self.seen)


def converted(recipe: str = "int8_dynamic", *, tied: bool = True) -> torch.fx.GraphModule:
    torch.manual_seed(0)
    program = torch.export.export(Tied(tied=tied).eval(), (torch.tensor([3, 7]),))
    return pq.convert_pt2e(pq.prepare_pt2e(program, BACKEND.quantizer(recipe)))


def lowered(gm: torch.fx.GraphModule, **options: bool) -> XnnpackArtifact:
    return BACKEND.lower(gm, **options)  # type: ignore[arg-type,return-value]


@pytest.mark.parametrize(
    ("recipe", "portable_only"), [("int8_dynamic", False), ("int8_dynamic", True), ("w4", False)]
)
def test_file_when_table_is_tied_then_its_integers_are_there_once(
    recipe, portable_only, tmp_path, monkeypatch
):
    gm = converted(recipe)
    table = next(t for t in gm.state_dict().values() if tuple(t.shape) == (ROWS, WIDTH))
    integers = table.numpy().tobytes()
    artifact = lowered(gm, portable_only=portable_only)
    monkeypatch.setenv(VARIABLE, PATCH.name)
    plain = lowered(gm, portable_only=portable_only)
    # One scale a row is in both, too: portable lookups keep theirs as a column of equal bytes.
    assert artifact.pte.count(integers) == 1
    assert plain.pte.count(integers) == 2
    assert plain.size_bytes - artifact.size_bytes >= len(integers) + 4 * ROWS - 256
    # The delegate's integers and the lookup's are the same bytes, and both are as they were.
    assert integers in read_named_data(artifact.pte).values()
    assert read_named_data(artifact.pte) == read_named_data(plain.pte)
    assert str(read_contents(artifact.pte)) == str(read_contents(plain.pte))
    artifact.save(tmp_path / "x.pte")
    loaded = BACKEND.load(tmp_path / "x.pte")
    for ids in torch.arange(10).reshape(5, 2):
        expected = plain.run(ids)
        assert torch.equal(artifact.run(ids), expected)
        assert torch.equal(loaded.run(ids), expected)


def test_file_when_shared_then_every_loader_of_executorch_reads_it(tmp_path):
    from executorch.runtime import Runtime, Verification

    artifact = lowered(converted())
    path = tmp_path / "x.pte"
    artifact.save(path)
    ids = torch.tensor([1, 2])
    expected = artifact.run(ids)
    checks = Verification.InternalConsistency
    # From a path the segments are read one by one, from bytes they are used in place.
    for source in (path, path.read_bytes()):
        method = Runtime.get().load_program(source, verification=checks).load_method("forward")
        assert torch.equal(method.execute([ids])[0], expected)


def test_file_when_nothing_is_tied_then_the_same_bytes():
    pte = lowered(converted(tied=False)).pte
    assert share_constants(pte) is pte
    shared = lowered(converted()).pte
    assert share_constants(shared) == shared
