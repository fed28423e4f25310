"""Calls of prepared and converted graphs are checked."""

import copy

import pytest
import torch
from torch.export import export

from pt2e_quant.core.errors import InputError
from pt2e_quant.flow.prepare.prepare_pt2e import prepare_pt2e


@pytest.fixture
def prepared(net, quantizer, images):
    return prepare_pt2e(export(net, (images[0],)), quantizer())


@pytest.mark.parametrize("again", [lambda gm: gm, copy.deepcopy], ids=["itself", "deepcopy"])
def test_call_when_its_shape_is_wrong_then_says_what_to_export(prepared, again):
    gm = again(prepared)
    with pytest.raises(InputError, match="exactly 4") as error:
        gm(torch.randn(5, 3, 8, 8))
    assert "dynamic_shapes={'x': {0: torch.export.Dim.AUTO}}" in str(error.value)


def test_hooks_when_the_users_own_then_they_stay(net, quantizer, images):
    seen = []
    gm = export(net, (images[0],)).module()
    gm.register_forward_hook(lambda module, args, output: seen.append(1))
    prepare_pt2e(gm, quantizer())(images[0])
    assert seen == [1]
