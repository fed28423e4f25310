"""Op tables refuse what would make their outcome depend on row order."""

from dataclasses import replace

import pytest
import torch

from pt2e_quant.core.errors import ConfigError
from pt2e_quant.core.formats.scale_format import ScaleFormat
from pt2e_quant.core.scheme_names import scheme_named, weight_scheme
from pt2e_quant.core.schemes import (
    INT8_ACTIVATION,
    INT8_WEIGHT,
    UINT8_ACTIVATION,
    Role,
    Scheme,
)
from pt2e_quant.graph.op_table import OUT, OpRow, OpTable, Slot
from pt2e_quant.graph.pattern import Op, Var

aten = torch.ops.aten
IN = Slot(at="x", role=Role.INPUT, accepts=(INT8_ACTIVATION,))
RESULT = Slot(at=OUT, role=Role.OUTPUT, accepts=(INT8_ACTIVATION,))
RELU = OpRow(
    name="relu", find=(Op(aten.relu.default, Var("x")),), slots=(IN, RESULT), lowers_to="clamp"
)


def test_table_when_two_rows_match_the_same_then_refused():
    with pytest.raises(ConfigError, match="rows of equal width match the same nodes"):
        OpTable(backend="Toy", rows=(RELU, replace(RELU, name="again")))


def test_table_when_two_rows_have_one_name_then_refused():
    other = replace(RELU, find=(Op(aten.tanh.default, Var("x")),))
    with pytest.raises(ConfigError, match="two rows of one name"):
        OpTable(backend="Toy", rows=(RELU, other))


def test_table_when_a_row_shares_with_no_slot_then_refused():
    with pytest.raises(ConfigError, match='row "relu" has no slot "y"'):
        OpTable(backend="Toy", rows=(replace(RELU, share=(("x", "y"),)),))


def test_slot_when_its_operator_has_an_axis_then_the_scheme_takes_it():
    slot = Slot(
        at="w",
        role=Role.WEIGHT,
        accepts=(replace(INT8_WEIGHT, granularity=type(INT8_WEIGHT.granularity)(1)),),
    )
    scheme = Scheme(name="s", input=None, output=None, weight=INT8_WEIGHT)
    assert slot.resolve(scheme).granularity.axis == 1


def test_slot_when_the_scheme_does_not_fit_then_says_expected_and_found():
    scheme = Scheme(name="u8", input=UINT8_ACTIVATION, output=None, weight=None)
    with pytest.raises(ValueError, match=r'its input "x" takes int8.*, not uint8'):
        IN.resolve(scheme)


def test_slot_when_it_takes_many_schemes_then_names_those_most_alike():
    groups = (None, 16, 32, 64, 128)
    accepts = tuple(
        weight_scheme(bits, group, symmetric=symmetric)
        for bits in (4, 8)
        for group in groups
        for symmetric in (True, False)
    )
    slot = Slot(at="w", role=Role.WEIGHT, accepts=accepts)
    scheme = scheme_named("w4_g32", scales=ScaleFormat(dtype=torch.float16))
    with pytest.raises(ValueError, match="16 others") as error:
        slot.resolve(scheme)
    first = str(error.value).split(" takes ")[1]
    assert first.startswith("int4[-8, 7] symmetric PerGroup(group_size=32, axis=-1) or int4")


def test_slot_when_optional_and_the_scheme_is_float_then_stays_float():
    scheme = Scheme(name="s", input=INT8_ACTIVATION, output=None, weight=None)
    assert replace(RESULT, is_optional=True).resolve(scheme) is None
    with pytest.raises(ValueError, match='scheme "s" leaves its output "out" float'):
        RESULT.resolve(scheme)
