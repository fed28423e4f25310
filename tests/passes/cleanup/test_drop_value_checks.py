"""Checks of values go, with a note; those that say how large a size can be stay."""

import pytest
import torch
from torch import nn

from pt2e_quant.graph.show import show
from pt2e_quant.passes.cleanup.drop_value_checks import drop_value_checks

X = torch.ones(4, 3)
TEXT = "this check of values is not in the file"


class Checked(nn.Module):
    def __init__(self, check) -> None:
        super().__init__()
        self.check = check

    def forward(self, x):
        self.check(x)
        return x.relu()


def of_all(x):
    torch._check_tensor_all((x < 9).all())


def of_a_number(x):
    torch._check(x.max().item() < 9)


def with_a_text(x):
    torch._assert_async((x < 9).all(), "too large")


@pytest.mark.parametrize("check", [of_all, of_a_number, with_a_text])
def test_drop_when_values_are_checked_then_gone_and_told_once(check):
    gm = torch.export.export(Checked(check), (X,)).module()
    assert "_assert_" in show(gm)
    result = drop_value_checks(gm)
    assert [note.text for note in result.notes] == [TEXT]
    names = [str(n.target) for n in gm.graph.nodes if n.op == "call_function"]
    assert names == ["aten.relu.default"]
    assert not drop_value_checks(gm).changed


class Cut(nn.Module):
    def forward(self, x):
        count = (x[:, 0] < 9).sum().item()
        torch._check(count >= 1)
        torch._check(count <= 4)
        return x[:count]


def test_drop_when_a_size_is_read_from_the_number_then_its_bounds_stay():
    gm = torch.export.export(Cut(), (X,)).module()
    before = show(gm)
    result = drop_value_checks(gm)
    assert [note.text for note in result.notes] == [TEXT]
    assert show(gm) == before


def test_drop_when_sizes_of_inputs_are_checked_then_nothing_is_done():
    def check(x):
        torch._check(x.shape[0] % 2 == 0)

    batch = torch.export.Dim("batch", max=8)
    program = torch.export.export(
        Checked(check),
        (X,),
        dynamic_shapes={"x": {0: 2 * batch}},
        prefer_deferred_runtime_asserts_over_guards=True,
    )
    gm = program.module()
    before = show(gm)
    assert drop_value_checks(gm).notes == ()
    assert show(gm) == before
