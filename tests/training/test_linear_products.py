import pytest
import torch
from torch import nn

from pt2e_quant.core.errors import ConfigError
from pt2e_quant.training.float8.linear import convert_to_float8_training
from pt2e_quant.training.linear_products import LowPrecisionLinear


def test_convert_linears_when_filtered_then_the_others_stay():
    module = nn.ModuleDict({"body": nn.Linear(4, 4), "head": nn.Linear(4, 2)})
    own = module["body"].weight
    convert_to_float8_training(module, filter=lambda part, name: name != "head")
    assert type(module["body"]) is LowPrecisionLinear
    assert type(module["head"]) is nn.Linear
    assert module["body"].weight is own


def test_convert_linears_when_none_is_meant_then_the_names_are_offered():
    module = nn.ModuleDict({"body": nn.Linear(4, 4)})
    with pytest.raises(ConfigError, match="body"):
        convert_to_float8_training(module, filter=lambda part, name: name == "bod")
    with pytest.raises(ConfigError, match="there is no linear"):
        convert_to_float8_training(nn.ReLU())


def test_convert_linears_when_a_linear_is_in_two_places_then_it_stays_one():
    shared = nn.Linear(4, 4)
    module = convert_to_float8_training(nn.Sequential(shared, nn.ReLU(), shared))
    assert module[0] is module[2]
    assert len(list(module.parameters())) == 2


def test_low_precision_linear_when_the_weight_is_frozen_then_the_input_alone_gets_a_gradient():
    module = convert_to_float8_training(nn.Linear(8, 4))
    module.weight.requires_grad_(False)
    x = torch.ones(2, 8, requires_grad=True)
    module(x).sum().backward()
    assert module.weight.grad is None
    assert x.grad.shape == x.shape
    assert "Float8Products" in repr(module)
