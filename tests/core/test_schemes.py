"""Which scheme a slot can take."""

from dataclasses import replace

import pytest
import torch

from pt2e_quant.core.granularity import PerChannel, PerTensor
from pt2e_quant.core.schemes import INT8_ACTIVATION, INT8_WEIGHT, Role, Scheme, TensorScheme


def test_narrower_and_symmetric_fit_but_not_the_other_way():
    narrow = replace(INT8_ACTIVATION, quant_min=-127, symmetric=True)
    assert narrow.fits(INT8_ACTIVATION)
    assert not INT8_ACTIVATION.fits(narrow)


@pytest.mark.parametrize(
    "change",
    [{"dtype": torch.uint8}, {"granularity": PerChannel(0)}, {"is_dynamic": True}],
)
def test_other_type_granularity_or_time_does_not_fit(change):
    assert not replace(INT8_ACTIVATION, **change).fits(INT8_ACTIVATION)


def test_range_outside_the_type_is_refused():
    with pytest.raises(ValueError, match=r"range \[-200, 127\] does not fit torch.int8"):
        TensorScheme(dtype=torch.int8, granularity=PerTensor(), symmetric=False, quant_min=-200)


def test_roles():
    scheme = Scheme(name="s", input=INT8_ACTIVATION, output=None, weight=INT8_WEIGHT)
    assert [scheme.for_role(r) for r in (Role.INPUT, Role.OUTPUT, Role.WEIGHT, Role.BIAS)] == [
        INT8_ACTIVATION,
        None,
        INT8_WEIGHT,
        None,
    ]
