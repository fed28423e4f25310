"""Recipes by name: one entry a family, parsed on demand, the nearest offered for others."""

import pytest
import torch
from torch import nn

from pt2e_quant.backends import get
from pt2e_quant.core.errors import AnnotationError, ConfigError
from pt2e_quant.core.scheme_names import scheme_named
from pt2e_quant.flow.prepare.prepare_pt2e import prepare_pt2e


@pytest.mark.parametrize(
    ("backend", "scheme", "nearest"),
    [
        ("cuda", "a16w8", "int8"),
        ("cpu", "a16w4", "int8"),
        ("cuda", "w3_g64", "w4_g64"),
        # Weights of 8 bits lose least at 8 bits, also where activations are then rounded.
        ("cuda", "w8", "int8_dynamic"),
        ("cuda", "mxfp8", "fp8_dynamic"),
        ("cuda", "nf4", "w4_g64"),
        ("xnnpack", "w4_g32", "a8w4_g32"),
        ("onnx", "nf4_g32", "nf4"),
    ],
)
def test_scheme_when_a_backend_has_no_kernel_then_refused_with_the_nearest(
    backend, scheme, nearest
):
    with pytest.raises(ConfigError, match=f'no kernel for scheme "{scheme}"') as caught:
        get(backend).quantizer(scheme)
    assert f'the nearest recipe it runs is "{nearest}"' in str(caught.value)


@pytest.mark.parametrize(
    ("backend", "scheme", "reason"),
    [
        ("cpu", "a16w8", r'linear: its input "x" takes uint8.*, not int16.* symmetric'),
        ("cuda", "a16w4", r'linear: its input "x" takes int8.*, not int16'),
        ("xnnpack", "a16w8", r'linear: its input "x" takes int8.*, not int16'),
        ("xnnpack", "w2", r'linear_weight_only: its weight "w" takes int8.*, not int2'),
        ("onnx", "a8w3_g32", r'linear_a8w\d: its weight "w" takes .*, not int3'),
    ],
)
def test_scheme_when_no_linear_takes_it_then_refused_with_what_the_op_table_says(
    backend, scheme, reason
):
    with pytest.raises(ConfigError, match=reason):
        get(backend).quantizer(scheme)


@pytest.mark.parametrize("backend", ["cpu", "cuda", "xnnpack"])
def test_rule_when_it_asks_for_16_bits_then_refused_with_node_reason_and_remedy(backend):
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8)).eval()
    ep = torch.export.export(model, (torch.randn(4, 16),))
    quantizer = get(backend).quantizer().set_global(scheme_named("a16w8"))
    with pytest.raises(AnnotationError, match=r'its input "x" takes u?int8.*not int16') as caught:
        prepare_pt2e(ep, quantizer)
    assert caught.value.node_name == "linear"
    assert "choose a recipe or scheme" in str(caught.value.fix)


def test_family_when_listed_then_one_entry_that_takes_every_name_of_it():
    recipes = get("onnx").recipes
    family = "w<2..8>[_g<16,32,64,128,256>]"
    assert list(recipes).count(family) == 1
    for name in ("w2", "w5_g64", "w4_g256", "w8_g16", "nf4", "int8"):
        assert name in recipes
        assert get("onnx").quantizer(name).scheme.name == name
    assert recipes["w5_g64"] == recipes[family]
    assert "w9" not in recipes
    assert "w4_g48" not in recipes


@pytest.mark.parametrize(
    ("backend", "name", "near"),
    [("cpu", "int8-reduced", "int8_reduced"), ("onnx", "w5_g46", "w5_g32"), ("cpu", "it8", "int8")],
)
def test_name_when_unknown_then_near_names_or_the_nearest_recipe(backend, name, near):
    with pytest.raises(ConfigError, match=f'"{near}"'):
        get(backend).quantizer(name)


@pytest.mark.parametrize("backend", ["cpu", "cuda", "onnx", "xnnpack"])
def test_lower_when_an_option_is_unknown_then_near_ones_before_any_work(backend):
    target = get(backend)
    for package in target.packages:
        pytest.importorskip(package)
    with pytest.raises(ConfigError, match='no option "stict" of lower: did you mean "strict"'):
        target.lower(None, stict=False)
