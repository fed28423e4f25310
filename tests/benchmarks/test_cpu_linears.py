"""What is measured of the CPU's linears has the classes that the registry asks for."""

import pytest
import torch

from benchmarks import cpu_linears
from pt2e_quant.kernels.int8_linear import cpu
from pt2e_quant.kernels.onednn import limbs_site

SIZES = ((1, 32, 32), (8, 32, 64), (40, 16, 32))


def check(ratios, class_of):
    of_rows = [class_of(rows, 32 * 32) for rows, _, _ in SIZES]
    assert ratios.keys() == {*of_rows, class_of(None, 32 * 32)}
    assert ratios[class_of(None, 32 * 32)] == min(ratios[name] for name in of_rows)


@pytest.mark.parametrize("form", ["rows", "groups"])
def test_weight_only_ratios_when_rows_are_float_then_have_each_class_and_the_worst_of_a_weight(
    form,
):
    ratios = cpu_linears.weight_only_ratios(1, SIZES)[form]
    check(ratios, lambda rows, weight: limbs_site.class_of(form, rows, weight))


def test_linear_ratios_when_rows_are_integers_then_have_each_class_and_the_worst_of_a_weight():
    check(cpu_linears.linear_ratios(1, SIZES), cpu.class_of)
    check(cpu_linears.dynamic_ratios(1, SIZES), cpu.dynamic_class_of)


@pytest.mark.parametrize(
    "calls_of", [cpu_linears.linear_calls, cpu_linears.dynamic_calls, cpu_linears.weight_only_calls]
)
def test_calls_when_run_then_give_results_of_one_shape_and_dtype(calls_of):
    for rows in (2, 6):
        made = [call() for call in calls_of(rows, 32, 64).values()]
        assert len(made) > 1
        assert {(y.shape, y.dtype) for y in made} == {((rows, 32), torch.float32)}
