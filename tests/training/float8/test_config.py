import pytest
import torch

from pt2e_quant.core.errors import ConfigError, UnsupportedError
from pt2e_quant.core.granularity import PerBlock, PerRow, PerTensor
from pt2e_quant.training.float8.config import (
    Float8TrainingConfig,
    GemmInputRole,
    LinearMMConfig,
    ScaledMMConfig,
    choose_mm_config,
)

INPUT, WEIGHT, GRAD = GemmInputRole.INPUT, GemmInputRole.WEIGHT, GemmInputRole.GRAD_OUTPUT
OWN = LinearMMConfig(
    output=ScaledMMConfig(use_fast_accum=True),
    grad_input=ScaledMMConfig(pad_inner_dim=True),
    grad_weight=ScaledMMConfig(emulate=True),
)


@pytest.mark.parametrize(
    ("left", "right", "name"),
    [
        (INPUT, WEIGHT, "output"),
        (GRAD, WEIGHT, "grad_input"),
        (GRAD, INPUT, "grad_weight"),
        (INPUT, GRAD, "grad_weight"),
    ],
)
def test_choose_mm_config_when_roles_are_given_then_the_product_is_found(left, right, name):
    assert choose_mm_config((left, OWN), (right, OWN)) == getattr(OWN, name)


def test_choose_mm_config_when_operands_disagree_then_the_error_names_both():
    other = LinearMMConfig(output=ScaledMMConfig(emulate=True))
    with pytest.raises(ConfigError) as found:
        choose_mm_config((INPUT, OWN), (WEIGHT, other))
    assert str(OWN.output) in str(found.value)
    assert str(other.output) in str(found.value)
    assert choose_mm_config((GRAD, LinearMMConfig()), (WEIGHT, other)) == ScaledMMConfig()


def test_choose_mm_config_when_roles_are_equal_then_it_refuses():
    with pytest.raises(UnsupportedError, match="weight and weight"):
        choose_mm_config((WEIGHT, OWN), (WEIGHT, OWN))


def test_training_config_when_settings_contradict_then_it_refuses():
    with pytest.raises(ConfigError, match="amax_history=4 with rowwise"):
        Float8TrainingConfig(scaling="rowwise", amax_history=4)
    with pytest.raises(ConfigError, match="float8_all_gather needs one scale"):
        Float8TrainingConfig(scaling="rowwise", float8_all_gather=True)
    with pytest.raises(ConfigError, match="no float8"):
        Float8TrainingConfig(input_dtype=torch.uint8)


def test_training_config_when_asked_for_granularity_then_it_is_that_of_the_scaling():
    def of(scaling, role, axis):
        return Float8TrainingConfig(scaling=scaling).granularity_of(role, inner_axis=axis)

    assert of("tensorwise", INPUT, -1) == PerTensor()
    assert of("rowwise", WEIGHT, 0) == PerRow(0)
    assert of("blockwise", WEIGHT, 0) == PerBlock((128, 128))
    assert of("blockwise", GRAD, 0) == PerBlock((128, 1))
    assert Float8TrainingConfig().emulated().mm.grad_weight.emulate
