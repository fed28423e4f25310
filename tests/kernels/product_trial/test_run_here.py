"""A product is tried on random integers, extremes among them, against the exact definition."""

from dataclasses import replace

import pytest
import torch

from pt2e_quant.kernels.product_trial import run_here as trial
from pt2e_quant.kernels.product_trial.product import (
    Operator,
    PostOpKind,
    Product,
    read_product,
)

CONV = Product(
    operator=Operator.CONV,
    x=(2, 6, 7, 5),
    weight=(4, 3, 3, 2),
    stride=(2, 1),
    padding=(1, 0),
    dilation=(1, 2),
    groups=2,
    is_shifted=True,
    has_bias=True,
)
LINEAR = Product(operator=Operator.LINEAR, x=(3, 5, 12), weight=(7, 12), has_bias=True)
CONV_1D = replace(CONV, x=(2, 6, 17), weight=(4, 3, 3), stride=(2,), padding=(1,), dilation=(1,))
SUM = {"summand": "uint8", "is_summand_shifted": True, "result": "uint8"}
PRODUCTS = {
    "conv": CONV,
    "conv_uint8": replace(CONV, result="uint8", is_result_shifted=True, is_packed_for_x=True),
    "conv_1d": CONV_1D,
    "conv_sum": replace(CONV, **SUM, post_op=PostOpKind(name="relu")),
    "conv_float_sum": replace(CONV, summand="float32"),
    "linear": LINEAR,
    "linear_one_row": replace(LINEAR, x=(1, 12)),
    "linear_many_rows": replace(LINEAR, x=(300, 12), result="uint8"),
    "linear_sum": replace(LINEAR, summand="float32", post_op=PostOpKind(name="relu")),
    "linear_sum_uint8": replace(LINEAR, summand="float32", result="uint8"),
    "int_mm": Product(operator=Operator.INT_MM, x=(5, 12), weight=(7, 12)),
}
POST_OPS = {
    "hardtanh": PostOpKind(name="hardtanh", bounds=("-inf", "+")),
    "relu6": PostOpKind(name="hardtanh", bounds=("0", "+")),
    "hardswish": PostOpKind(name="hardswish"),
    "swish": PostOpKind(name="swish"),
    "gelu": PostOpKind(name="gelu", algorithm="none"),
    "gelu_tanh": PostOpKind(name="gelu", algorithm="tanh"),
    "leaky_relu": PostOpKind(name="leaky_relu"),
    "tanh": PostOpKind(name="tanh"),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_product_when_onednn_has_it_then_right_and_read_back(name):
    assert trial.try_product(PRODUCTS[name], (1, 2)) == trial.RIGHT
    assert read_product(PRODUCTS[name].key) == PRODUCTS[name]


@pytest.mark.parametrize("name", POST_OPS)
def test_post_op_when_tried_then_right(name):
    for result in ("uint8", "float32"):
        product = replace(LINEAR, result=result, post_op=POST_OPS[name])
        assert trial.try_product(product) == trial.RIGHT


def off_by(change):
    """An operator that is right but for one change."""

    def make(operator):
        return lambda *args: change(operator(*args).clone())

    return make


def one_channel(made):
    made.select(1, 1).mul_(1.1)
    return made


FAULTS = {
    "swapped": lambda made: made.flip(1),
    "one_channel": one_channel,
    "not_a_number": lambda made: made.mul_(torch.nan),
    "cut_off": lambda made: made.clamp(-1.0, 1.0),
    "other_size": lambda made: made[:, :1],
}


@pytest.mark.parametrize("fault", FAULTS)
def test_product_when_wrong_then_the_reason(monkeypatch, fault):
    monkeypatch.setattr(trial, "QConv", off_by(FAULTS[fault])(trial.QConv))
    assert "oneDNN gives" in trial.try_product(CONV)


def test_product_when_wrong_at_one_end_of_the_rows_then_the_reason(monkeypatch):
    def last_row(made):
        made[-1] = 7.0
        return made

    monkeypatch.setattr(trial, "QLinear", off_by(last_row)(trial.QLinear))
    assert "less than 1 %" in trial.try_product(replace(LINEAR, x=(300, 12)))


def test_product_when_refused_then_the_reason():
    product = replace(CONV_1D, post_op=PostOpKind(name="hardtanh", bounds=("0", "+")))
    assert "Unsupported post op hardtanh" in trial.try_product(product)


def test_threads_when_tried_with_several_then_as_before():
    before = torch.get_num_threads()
    trial.try_product(LINEAR, (1, 2))
    assert torch.get_num_threads() == before
