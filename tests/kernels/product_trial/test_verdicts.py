"""Verdicts are kept per machine, in a file that is ignored where it is damaged."""

import json

import pytest

from pt2e_quant.kernels.product_trial import verdicts
from pt2e_quant.kernels.product_trial.product import Operator, Product
from pt2e_quant.kernels.product_trial.run_in_child import TrialError

A, B, C = (Product(operator=Operator.LINEAR, x=(n, 8), weight=(4, 8)) for n in (1, 2, 3))


@pytest.fixture
def tried(monkeypatch, tmp_path):
    """The products that a child was asked for; B is wrong."""
    asked = []

    def run(products, *, command):
        asked.append(list(products))
        return {product: "wrong" if product == B else "" for product in products}

    monkeypatch.setenv(verdicts.CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(verdicts, "run_in_child", run)
    return asked


def test_products_when_known_then_not_tried_again(tried):
    assert verdicts.verdicts_of([A, B]) == ({A: "", B: "wrong"}, "")
    assert verdicts.verdicts_of([B, C]) == ({B: "wrong", C: ""}, "")
    assert verdicts.verdicts_of([A, B, C])[0][B] == "wrong"
    assert tried == [[A, B], [C]]


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"a": 1}', "\\x00"])
def test_cache_when_damaged_then_tried_again_and_mended(tried, text):
    verdicts.verdicts_of([A])
    verdicts.cache_file().write_text(text)
    assert verdicts.verdicts_of([A]) == ({A: ""}, "")
    assert tried == [[A], [A]]
    assert A.key in json.loads(verdicts.cache_file().read_text())


def test_cache_when_it_cannot_be_written_then_tried_each_time(tried, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(verdicts.CACHE_VARIABLE, str(tmp_path / "file"))
    assert verdicts.verdicts_of([B]) == verdicts.verdicts_of([B]) == ({B: "wrong"}, "")
    assert tried == [[B], [B]]


def test_cache_when_the_machine_is_another_then_another_file(tried, monkeypatch):
    here = verdicts.cache_file()
    monkeypatch.setattr(verdicts, "_machine", lambda: ["another"])
    assert verdicts.cache_file() != here
    assert verdicts.cache_file().parent == here.parent


def test_products_when_no_child_can_run_then_taken_with_the_reason(tried, monkeypatch):
    verdicts.verdicts_of([B])

    def run(products, *, command):
        raise TrialError("no processes here")

    monkeypatch.setattr(verdicts, "run_in_child", run)
    assert verdicts.verdicts_of([A, B]) == ({A: "", B: "wrong"}, "no processes here")


@pytest.mark.parametrize(("value", "are_tried"), [("0", False), ("off", False), ("1", True)])
def test_trials_when_turned_off_by_the_environment_then_off(monkeypatch, value, are_tried):
    monkeypatch.setenv(verdicts.TRIALS_VARIABLE, value)
    assert verdicts.are_tried() is are_tried
