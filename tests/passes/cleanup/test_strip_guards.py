import pytest
import torch
from torch import nn

from pt2e_quant.graph.show import show
from pt2e_quant.passes.cleanup.strip_guards import no_guards, strip_guards


class Casting(nn.Module):
    def forward(self, x):
        return x.to(torch.float32) + 1


def test_strip_when_guards_and_dtype_checks_exist_then_removed():
    gm = torch.export.export(Casting(), (torch.ones(2, 3),)).module()
    assert "_guards_fn = call_module _guards_fn(x)" in show(gm)
    assert "_assert_tensor_metadata" in show(gm)
    assert no_guards.check(gm) is not None
    result = strip_guards(gm)
    assert [n.text for n in result.notes] == [
        "removed torch's input guards",
        "removed a check of a known dtype",
    ]
    assert show(gm) == (
        "x: f32[2, 3] = input\n"
        "to: f32[2, 3] = to(x, f32)\n"
        "add: f32[2, 3] = add(to, 1)\n"
        "return (add)\n"
    )
    assert not hasattr(gm, "_guards_fn")
    assert torch.equal(gm(torch.ones(2, 3)), torch.full((2, 3), 2.0))


def test_strip_when_checks_are_inside_regions_then_removed():
    class Region(nn.Module):
        def forward(self, x):
            with torch.no_grad():
                y = x.to(torch.float32) + 1
            return y * 2

    gm = torch.export.export(Region(), (torch.ones(2, 3),)).module()
    assert "_assert_tensor_metadata" in show(gm)
    strip_guards(gm)
    assert no_guards.check(gm) is None
    assert "_assert_tensor_metadata" not in show(gm)
    assert torch.equal(gm(torch.ones(2, 3)), torch.full((2, 3), 4.0))


def test_strip_when_a_module_call_is_no_guard_then_it_stays():
    gm = torch.fx.symbolic_trace(nn.Sequential(nn.ReLU()))
    assert not strip_guards(gm).changed
    assert "call_module 0" in show(gm)


def test_strip_when_run_twice_then_the_second_changes_nothing():
    gm = torch.export.export(Casting(), (torch.ones(2, 3),)).module()
    strip_guards(gm)
    assert not strip_guards(gm).changed


def test_strip_when_a_check_of_values_has_no_text_then_dead_code_elimination_keeps_it():
    class Checked(nn.Module):
        def forward(self, x):
            torch._assert_async((x < 9).all())
            return x + 1

    gm = torch.export.export(Checked(), (torch.ones(2),)).module()
    strip_guards(gm)
    gm.graph.eliminate_dead_code()
    gm.recompile()
    with pytest.raises(RuntimeError, match="without a text"):
        gm(torch.full((2,), 10.0))
