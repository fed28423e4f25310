"""`run_decompositions` with operators looked up once: the same programs, of all operators."""

import pytest
import torch
import torch._export.utils as export_utils
from torch import Tensor, nn
from torch._C import DispatchKey
from torch._ops import OperatorBase
from torch._subclasses.fake_impls import op_implementations_dict

from pt2e_quant.accelerate.composite_operators import PATCH, quick_decompositions

pytestmark = pytest.mark.skipif(not PATCH.is_on(), reason="another torch: nothing is replaced")


class Composites(nn.Module):
    """Operators that are made of others: of torch, and one that is registered late."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.conv = nn.GroupNorm(2, 4), nn.Conv1d(4, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(self.norm(x))
        x = nn.functional.scaled_dot_product_attention(x, x, x)
        return nn.functional.dropout(x, 0.5, self.training).matmul(x.mT)


INPUTS = (torch.linspace(-1, 1, 64).reshape(2, 4, 8),)


@pytest.mark.parametrize("table", [None, {}])
def test_quick_decompositions_when_a_program_is_decomposed_then_it_is_the_same(table):
    program = torch.export.export(Composites().eval(), INPUTS)
    kernels = {op: dict(op.py_kernels) for op in export_utils._collect_all_valid_cia_ops()}
    with quick_decompositions():
        first, second = (program.run_decompositions(table) for _ in range(2))
    plain = program.run_decompositions(table)
    assert first.graph_module.code == second.graph_module.code == plain.graph_module.code
    assert all(dict(op.py_kernels) == kernels[op] for op in kernels)


def test_quick_decompositions_when_an_operator_is_registered_since_then_it_is_decomposed():
    with quick_decompositions():
        torch.export.export(Composites().eval(), INPUTS).run_decompositions()
    library = torch.library.Library("pt2e_quant_late", "DEF")
    try:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x + x, "CompositeImplicitAutograd")

        class Late(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return torch.ops.pt2e_quant_late.twice(x)

        program = torch.export.export(Late(), INPUTS)
        with quick_decompositions():
            made = program.run_decompositions()
        targets = {str(node.target) for node in made.graph.nodes if node.op == "call_function"}
        assert targets == {"aten.add.Tensor"}
    finally:
        library._destroy()


def test_quick_decompositions_when_a_kernel_is_registered_twice_then_as_torch_refuses_it():
    operator = torch.ops.aten.matmul.default

    def refusal() -> str:
        with pytest.raises((RuntimeError, AssertionError)) as error:
            operator.py_impl(DispatchKey.Python)(lambda: None)
        return str(error.value)

    with quick_decompositions():
        quick = refusal()
    assert quick == refusal()


@pytest.mark.parametrize("last", [1, 500, 3000])
def test_quick_decompositions_when_interrupted_then_operators_have_the_kernels_they_had(last):
    program = torch.export.export(Composites().eval(), INPUTS)
    operators = export_utils._collect_all_valid_cia_ops()
    kernels = {op: dict(op.py_kernels) for op in operators}
    rules = set(op_implementations_dict)
    with quick_decompositions():
        quick, left = OperatorBase.py_impl, last

        def interrupted(self, key):
            nonlocal left
            left -= 1
            if not left:
                raise KeyboardInterrupt
            return quick(self, key)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(OperatorBase, "py_impl", interrupted)
            with pytest.raises(KeyboardInterrupt):
                program.run_decompositions()
    assert all(dict(op.py_kernels) == kernels[op] for op in operators)
    assert set(op_implementations_dict) == rules


def test_quick_decompositions_when_left_then_nothing_is_replaced():
    before = export_utils._materialize_cpp_cia_ops, OperatorBase.py_impl
    with pytest.raises(ZeroDivisionError), quick_decompositions():
        _ = OperatorBase.py_impl is before[1] or 1 / 0
    assert (export_utils._materialize_cpp_cia_ops, OperatorBase.py_impl) == before
