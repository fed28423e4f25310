"""What is measured of the CPU's weight-only products has the classes that the registry asks for."""

from benchmarks.cpu_kernels import weight_only_calls, weight_only_ratios
from pt2e_quant.kernels.onednn.digits_site import class_of


def test_ratios_have_each_class_and_the_worst_of_a_weight():
    found = weight_only_ratios(1, ((1, 32, 32), (8, 32, 64), (40, 16, 32)))
    for form, ratios in found.items():
        of_rows = [class_of(form, rows, 32 * 32) for rows in (1, 8, 40)]
        assert ratios.keys() == {*of_rows, class_of(form, None, 32 * 32)}
        assert ratios[class_of(form, None, 32 * 32)] == min(ratios[name] for name in of_rows)


def test_calls_give_one_result():
    for rows in (2, 6):
        calls = weight_only_calls(rows, 32, 64)
        assert {call().shape for call in calls.values()} == {(rows, 32)}
