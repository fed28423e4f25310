"""Specs of every kind become observers, and refusals name the node."""

import pytest
import torch
from torch.export import export

from pt2e_quant.core.errors import AnnotationError
from pt2e_quant.core.specs import (
    DerivedQuantizationSpec,
    FixedQParamsQuantizationSpec,
    QuantizationSpec,
)
from pt2e_quant.flow.annotate.groups import Group
from pt2e_quant.flow.annotate.observer_choice import derive_bias_qparams
from pt2e_quant.flow.prepare.make_observer import make_observer
from pt2e_quant.observers.static.minmax import MinMaxObserver, PerChannelMinMaxObserver
from pt2e_quant.observers.static.moving_average import MovingAveragePerChannelMinMaxObserver
from pt2e_quant.observers.training.fake_quantize import FakeQuantize


@pytest.fixture
def node():
    gm = export(torch.nn.ReLU(), (torch.randn(2),)).module()
    return next(n for n in gm.graph.nodes if n.op == "call_function")


def _group(spec, node, index=0, sources=()):
    return Group(index=index, spec=spec, places=[node], sources=list(sources))


def test_constructor_when_plain_or_with_args_then_the_same_observer(node):
    for constructor in (MinMaxObserver, MinMaxObserver.with_args(eps=2**-12)):
        spec = QuantizationSpec(torch.int8, constructor, -128, 127, torch.per_tensor_affine)
        made = make_observer(_group(spec, node), {})
        assert isinstance(made, MinMaxObserver)
        assert (made.quant_min, made.quant_max) == (-128, 127)


def test_spec_when_used_twice_then_makes_two_observers(node):
    spec = QuantizationSpec(torch.int8, MinMaxObserver, -128, 127, torch.per_tensor_affine)
    assert make_observer(_group(spec, node), {}) is not make_observer(_group(spec, node), {})


def test_channel_axis_when_the_observer_is_per_channel_then_passed(node):
    scheme = torch.per_channel_symmetric
    spec = QuantizationSpec(torch.int8, PerChannelMinMaxObserver, -127, 127, scheme, 1)
    assert make_observer(_group(spec, node), {}).ch_axis == 1


@pytest.mark.parametrize("axis", [None, 0, 1])
def test_fake_quantize_when_the_spec_names_an_axis_then_its_observer_has_it(node, axis):
    observer = MovingAveragePerChannelMinMaxObserver.with_args(ch_axis=1)
    constructor = FakeQuantize.with_args(observer=observer)
    spec = QuantizationSpec(
        torch.int8, constructor, -128, 127, torch.per_channel_symmetric, ch_axis=axis
    )
    made = make_observer(_group(spec, node), {})
    assert made.activation_post_process.ch_axis == (1 if axis is None else axis)
    made(torch.randn(3, 4))
    assert made.calculate_qparams()[0].numel() == (3 if axis == 0 else 4)


def test_fixed_spec_when_made_then_its_qparams_are_known(node):
    spec = FixedQParamsQuantizationSpec(torch.int8, 1 / 256, -128, -128, 127)
    scale, zero_point = make_observer(_group(spec, node), {}).calculate_qparams()
    assert (float(scale), int(zero_point)) == (1 / 256, -128)


def test_bias_spec_when_derived_then_its_scale_is_the_product(node):
    activation = MinMaxObserver(dtype=torch.int8)
    weight = PerChannelMinMaxObserver(dtype=torch.int8, qscheme=torch.per_channel_symmetric)
    activation(torch.tensor([-1.0, 3.0]))
    weight(torch.tensor([[1.0], [2.0]]))
    sources = [_group(None, node, 0), _group(None, node, 1)]
    spec = DerivedQuantizationSpec([], derive_bias_qparams, torch.int32)
    made = make_observer(_group(spec, node, 2, sources), {0: activation, 1: weight})
    scale, zero_point = made.calculate_qparams()
    expected = activation.calculate_qparams()[0] * weight.calculate_qparams()[0]
    assert torch.equal(scale, expected)
    assert zero_point.tolist() == [0, 0]


def test_constructor_when_it_raises_then_the_error_names_spec_and_node(node):
    spec = QuantizationSpec(torch.int8, MinMaxObserver, 5, 9, torch.per_tensor_affine)
    with pytest.raises(AnnotationError) as error:
        make_observer(_group(spec, node), {})
    assert "MinMaxObserver cannot be made from QuantizationSpec" in str(error.value)
    assert "node    relu" in str(error.value)


def test_constructor_when_it_makes_no_module_then_refused(node):
    spec = QuantizationSpec(torch.int8, lambda **_: 3)
    with pytest.raises(AnnotationError, match="made a int, not a module"):
        make_observer(_group(spec, node), {})


@pytest.mark.parametrize("kind", [MinMaxObserver, PerChannelMinMaxObserver])
def test_twin_when_made_then_as_constructed_and_sharing_nothing(kind):
    made = kind(dtype=torch.int8, quant_min=-127, quant_max=127)
    twin, fresh = made.twin(), kind(dtype=torch.int8, quant_min=-127, quant_max=127)
    assert type(twin) is kind
    assert vars(twin).keys() == vars(fresh).keys()
    assert str(twin) == str(fresh)
    twin.register_forward_hook(lambda *args: None)
    twin.observes_constant = True
    twin(torch.randn(3, 4))
    assert not made.seen
    assert not made.observes_constant
    assert not made._forward_hooks
    for name, value in fresh.state_dict().items():
        assert torch.equal(made.state_dict()[name], value)
