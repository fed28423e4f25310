import pytest
import torch
from torch.fx import Graph

from pt2e_quant.core.dtypes import DTYPES
from pt2e_quant.core.errors import ConfigError
from pt2e_quant.core.packing import pack
from pt2e_quant.core.unpack_op import Unpack, is_unpack, unpacked_dtype

ROWS = [row for row in DTYPES.values() if row.bits <= 8]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: str(row.dtype))
@pytest.mark.parametrize("shape", [(3, 5), (0, 4), (7,), (2, 3, 3, 3)])
def test_unpack_when_checked_by_torch_then_a_proper_operator(row, shape):
    values = torch.randint(row.quant_min, row.quant_max + 1, shape).to(row.storage)
    arguments = (pack(values, row.dtype), row.bits, row.signed, list(shape))
    assert torch.equal(Unpack(*arguments), values)
    torch.library.opcheck(Unpack, arguments)
    wide = Unpack(*arguments, dtype=torch.int64)
    assert wide.dtype is torch.int64
    assert torch.equal(wide, values.long())
    torch.library.opcheck(Unpack, arguments, {"dtype": torch.int64})


def test_unpack_when_exported_then_one_node_that_says_its_dtype():
    class Table(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("packed", pack(torch.tensor([[1, -2, 3]]), torch.int3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + Unpack(self.packed, 3, True, [1, 3])

    x = torch.zeros(2, 3)
    program = torch.export.export(Table(), (x,)).run_decompositions()
    (node,) = [n for n in program.graph.nodes if is_unpack(n)]
    assert unpacked_dtype(node) == torch.int3
    assert program.module()(x).tolist() == [[1, -2, 3], [1, -2, 3]]


def test_unpack_when_sizes_are_symbols_then_stay_so():
    class Cut(torch.nn.Module):
        def forward(self, packed: torch.Tensor) -> torch.Tensor:
            return Unpack(packed, 4, False, [packed.shape[0], packed.shape[1] * 2])

    dims = ({0: torch.export.Dim("n", min=2), 1: torch.export.Dim("k", min=2)},)
    program = torch.export.export(
        Cut(), (torch.zeros(3, 4, dtype=torch.uint8),), dynamic_shapes=dims
    )
    assert program.module()(torch.full((5, 7), 0x21, dtype=torch.uint8)).shape == (5, 14)


@pytest.mark.parametrize("bits", [0, 9, -1])
def test_unpack_when_width_is_unknown_then_refuses(bits):
    with pytest.raises(ConfigError, match="1 to 8 bits"):
        Unpack(torch.zeros(1, dtype=torch.uint8), bits, True, [1])


def test_unpack_when_bytes_do_not_fit_then_refuses_also_for_fakes():
    with pytest.raises(ConfigError, match="are packed in"):
        Unpack(torch.zeros(2, dtype=torch.uint8), 4, True, [9])
    with torch._subclasses.FakeTensorMode(), pytest.raises(ConfigError, match="are packed in"):
        Unpack(torch.zeros(2, dtype=torch.uint8), 4, True, [9])


def test_is_unpack_when_another_call_then_false():
    graph = Graph()
    assert not is_unpack(graph.placeholder("x"))
