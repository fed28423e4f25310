import pytest
import torch

from pt2e_quant.core.errors import ConfigError
from pt2e_quant.core.granularity import PerChannel, PerGroup, PerTensor, PerToken
from pt2e_quant.core.scheme_names import scheme_named


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("group", [None, 32, 128])
def test_weight_only_when_named_then_activations_are_float(bits, group):
    scheme = scheme_named(f"w{bits}" + (f"_g{group}" if group else ""))
    assert scheme.input is None
    assert scheme.output is None
    assert scheme.weight.dtype == getattr(torch, f"int{bits}")
    assert scheme.weight.granularity == (PerGroup(group) if group else PerChannel(0))
    assert scheme.weight.symmetric


def test_affine_weights_when_named_then_unsigned():
    weight = scheme_named("w4_g32", symmetric=False).weight
    assert (weight.dtype, weight.range, weight.symmetric) == (torch.uint4, (0, 15), False)


@pytest.mark.parametrize(
    ("name", "granularity"),
    [
        ("int8_dynamic", PerToken()),
        ("a8w8", PerToken()),
        ("a8w4_g32", PerToken()),
        ("int8_dynamic_per_tensor", PerTensor()),
    ],
)
def test_dynamic_when_named_then_inputs_only_and_at_run_time(name, granularity):
    scheme = scheme_named(name)
    assert scheme.input.is_dynamic
    assert scheme.input.granularity == granularity
    assert scheme.output is None


@pytest.mark.parametrize(
    ("other", "name"),
    [("w4a4", "a4w4"), ("w4a8_g32", "a8w4_g32"), ("w3a16_g64", "w3_g64"), ("w8a8", "a8w8")],
)
def test_name_when_it_reads_weights_first_then_the_same_scheme(other, name):
    assert scheme_named(other) == scheme_named(name)


@pytest.mark.parametrize("bits", [4, 8])
def test_a16_when_named_then_static_int16_inputs_and_outputs(bits):
    scheme = scheme_named(f"a16w{bits}")
    assert scheme.input == scheme.output
    assert (scheme.input.dtype, scheme.input.is_dynamic) == (torch.int16, False)
    assert scheme.weight.dtype == getattr(torch, f"int{bits}")


def test_a4_when_named_then_static_of_sixteen_integers():
    scheme = scheme_named("w4a4")
    assert scheme.name == "a4w4"
    assert scheme.input == scheme.output
    assert scheme.input.range == (-8, 7)
    assert not scheme.input.symmetric
    assert not scheme.input.is_dynamic
    assert scheme.weight == scheme_named("w4").weight


@pytest.mark.parametrize(
    "name", ["", "w9", "w4_g0", "a5w4", "w4a2", "w4g32", "int8_dynamics", "W4"]
)
def test_unknown_name_when_asked_then_refused(name):
    with pytest.raises(ConfigError, match="there is no scheme"):
        scheme_named(name)
