"""Which scheme a slot can take."""

from dataclasses import replace

import pytest
import torch

from pt2e_quant.core.granularity import PerChannel, PerTensor
from pt2e_quant.core.schemes import INT8_ACTIVATION, INT8_WEIGHT, Role, Scheme, TensorScheme


def test_fits_when_narrower_and_symmetric_then_only_that_way():
    narrow = replace(INT8_ACTIVATION, quant_min=-127, symmetric=True)
    assert narrow.fits(INT8_ACTIVATION)
    assert not INT8_ACTIVATION.fits(narrow)


@pytest.mark.parametrize(
    "change",
    [{"dtype": torch.uint8}, {"granularity": PerChannel(0)}, {"is_dynamic": True}],
)
def test_fits_when_type_granularity_or_time_differs_then_not(change):
    assert not replace(INT8_ACTIVATION, **change).fits(INT8_ACTIVATION)


def test_scheme_when_its_range_is_outside_the_type_then_refused():
    with pytest.raises(ValueError, match=r"range \[-200, 127\] does not fit torch.int8"):
        TensorScheme(dtype=torch.int8, granularity=PerTensor(), symmetric=False, quant_min=-200)


def test_for_role_when_a_scheme_has_three_tensors_then_each_role_gets_its_own():
    scheme = Scheme(name="s", input=INT8_ACTIVATION, output=None, weight=INT8_WEIGHT)
    assert [scheme.for_role(r) for r in (Role.INPUT, Role.OUTPUT, Role.WEIGHT, Role.BIAS)] == [
        INT8_ACTIVATION,
        None,
        INT8_WEIGHT,
        None,
    ]
