"""Recipes by name: one entry a family, parsed on demand, the nearest offered for others."""

import pytest

from pt2e_quant.backends import get
from pt2e_quant.core.errors import ConfigError


@pytest.mark.parametrize(
    ("backend", "scheme", "nearest"),
    [
        ("cuda", "a16w8", "int8"),
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
