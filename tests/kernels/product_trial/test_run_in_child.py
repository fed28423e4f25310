"""A child tries the products; where it hangs or ends, the one it was trying is at fault."""

import sys

import pytest

from pt2e_quant.kernels.product_trial.product import Operator, Product
from pt2e_quant.kernels.product_trial.run_in_child import COMMAND, TrialError, run_in_child

PRODUCTS = [
    Product(operator=Operator.LINEAR, x=(rows, 8), weight=(4, 8)) for rows in (1, 2, 3, 4, 5)
]
LOOP = """
import json, os, sys, time
for index, line in enumerate(sys.stdin):
    print(json.dumps({{"start": index}}), flush=True)
    rows = json.loads(line)["x"][0]
    {fault}
    print(json.dumps({{"end": index, "reason": "odd" if rows % 2 else ""}}), flush=True)
"""
ODD = dict(zip(PRODUCTS, ("odd", "", "odd", "", "odd"), strict=True))


def child(fault="pass"):
    return [sys.executable, "-c", LOOP.format(fault=fault)]


def test_products_when_tried_in_a_child_then_as_it_reports():
    assert run_in_child(PRODUCTS, command=child()) == ODD


def test_product_when_the_child_dies_of_it_then_named_and_the_rest_tried():
    found = run_in_child(PRODUCTS, command=child("rows in (2, 5) and os.abort()"))
    assert "ends the process" in found[PRODUCTS[1]]
    assert "ends the process" in found[PRODUCTS[4]]
    rest = [p for i, p in enumerate(PRODUCTS) if i not in (1, 4)]
    assert {p: found[p] for p in rest} == {p: ODD[p] for p in rest}


def test_product_when_it_hangs_then_named_and_the_rest_tried():
    found = run_in_child(PRODUCTS, command=child("rows == 3 and time.sleep(600)"), each_s=1.0)
    assert "takes more than 1 s" in found[PRODUCTS[2]]
    assert [found[p] for p in PRODUCTS if p is not PRODUCTS[2]] == ["odd", "", "", "odd"]


@pytest.mark.parametrize(
    ("command", "text"),
    [
        ([sys.executable, "-c", "raise SystemExit(3)"], "code 3"),
        ([sys.executable, "-c", "import time; time.sleep(600)"], "takes more than 2 s"),
        (["/nonexistent/python"], "does not start"),
    ],
)
def test_child_when_it_reports_nothing_then_an_error(command, text):
    with pytest.raises(TrialError, match=text):
        run_in_child(PRODUCTS, command=command, start_s=2.0)


def test_real_child_when_run_then_products_are_right():
    assert run_in_child(PRODUCTS[:2], command=COMMAND) == dict.fromkeys(PRODUCTS[:2], "")
