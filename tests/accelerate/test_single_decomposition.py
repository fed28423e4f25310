"""ExecuTorch's lowering with one trace of the decompositions: the same programs, fewer traces."""

import pytest
import torch
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.exir import to_edge_transform_and_lower
from executorch.exir.program import _program
from torch import Tensor, nn
from torch.export import ExportedProgram

from pt2e_quant.accelerate.patch import Patch
from pt2e_quant.accelerate.single_decomposition import PATCH, decompose_once

pytestmark = pytest.mark.skipif(not PATCH.is_on(), reason="other versions: nothing is replaced")


class Kept(nn.Module):
    """Operators that the partitioner keeps whole: each call of them goes into the delegate."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.prelu = nn.Conv2d(2, 4, 3), nn.PReLU(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.prelu(self.conv(x)).mean((2, 3))


class LetGo(nn.Module):
    """A call of an operator that the partitioner asks to keep, and then lets go of."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.max_pool2d(x, 2, stride=3)


class Writes(nn.Module):
    """A buffer that each call writes, and a branch."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(1, 2, 6, 6))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add_(x)
        return torch.cond(x.sum() > 0, lambda y: y.log1p(), lambda y: y * 2.0, (self.seen,))


def file_of(model, shape):
    program = torch.export.export(model.eval(), (torch.linspace(-1, 1, 72).reshape(shape),))
    partitioner = [XnnpackPartitioner()]
    edge = to_edge_transform_and_lower(program, partitioner=partitioner)
    return bytes(edge.to_executorch().buffer)


@pytest.fixture
def traces(monkeypatch):
    """The tables of all traces since."""
    tables, decompose = [], ExportedProgram.run_decompositions

    def counted(self, table=None, **options):
        tables.append(table)
        return decompose(self, table, **options)

    monkeypatch.setattr(ExportedProgram, "run_decompositions", counted)
    return tables


@pytest.mark.filterwarnings("ignore:Mutation on a buffer")
@pytest.mark.parametrize(
    ("make", "plain", "quick"), [(Kept, 3, 1), (LetGo, 3, 2), (Writes, 3, 1)], ids=str
)
def test_decompose_once_when_lowered_then_fewer_traces_give_the_same_file(
    make, plain, quick, traces
):
    torch.manual_seed(0)
    model, shape = make(), (1, 2, 6, 6)
    file_of(model, shape)  # ExecuTorch traces patterns of its own when it is first called
    traces.clear()
    wanted = file_of(model, shape)
    assert len(traces) == plain
    traces.clear()
    with decompose_once():
        assert file_of(model, shape) == wanted
    assert len(traces) == quick


def test_decompose_once_when_a_user_decomposes_inside_then_it_is_done():
    program = torch.export.export(Kept().eval(), (torch.ones(1, 2, 6, 6),))
    with decompose_once():
        functional, decomposed = program.run_decompositions({}), program.run_decompositions()
    assert functional is not program
    assert "aten.convolution.default" in str(decomposed.graph)


def test_decompose_once_when_lowering_fails_then_the_program_is_decomposed_later():
    program = torch.export.export(Kept().eval(), (torch.ones(1, 2, 6, 6),))
    with decompose_once():
        with pytest.raises(AttributeError):
            to_edge_transform_and_lower(program, partitioner=["no partitioner"])
        assert program.run_decompositions({}) is not program


def test_decompose_once_when_version_is_unknown_then_nothing_is_replaced(monkeypatch):
    old = Patch(name=PATCH.name, saves="", versions={"torch": "0.1"})
    monkeypatch.setattr("pt2e_quant.accelerate.single_decomposition.PATCH", old)
    before = _program._gen_edge_manager_for_partitioners
    with decompose_once():
        assert _program._gen_edge_manager_for_partitioners is before
