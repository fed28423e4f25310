"""Both forms of what is measured on CPUs compute the same, in uint8 and one layout."""

import pytest
import torch

from benchmarks.cpu_elementwise import CASES, calls, ratios
from pt2e_quant.backends.cpu.passes.single_pass_qdq import hear_deprecation


@pytest.fixture(autouse=True)
def _seeded():
    hear_deprecation()
    torch.manual_seed(0)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.op}, {case.name}")
def test_calls_when_both_forms_run_then_results_agree_within_a_step_in_one_layout(case):
    shapes = tuple((1, 8, *shape[2:]) if len(shape) == 4 else shape for shape in case.shapes[0])
    found = {name: call() for name, call in calls(case, shapes).items()}
    assert {made.dtype for made in found.values()} == {torch.uint8}
    assert (found["float"].int() - found["integer"].int()).abs().max() <= 1
    assert found["float"].stride() == found["integer"].stride()


def test_ratios_when_measured_then_have_each_class_of_the_unit():
    cases = tuple(case for case in CASES if case.op == "data_movement")
    found = ratios(1, cases)
    assert {op: set(of_op) for op, of_op in found.items()} == {
        "data_movement": {"cat", "max_pool2d"}
    }
