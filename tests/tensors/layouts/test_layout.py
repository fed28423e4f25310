from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pt2e_quant.core.errors import ConfigError
from pt2e_quant.core.formats.format_schemes import FORMAT_SCHEMES
from pt2e_quant.core.formats.scale_format import ScaleFormat
from pt2e_quant.core.scheme_names import scheme_named
from pt2e_quant.tensors.layouts.layout import Plain
from pt2e_quant.tensors.layouts.table import LAYOUTS, layout_named, register_layout
from pt2e_quant.tensors.prune import prune_2_4
from pt2e_quant.tensors.quantized_tensor import QuantizedTensor

NAMES = ("w1", "w1.58", "w2", "w3", "w4", "w4_g32", "w6", "w8", "fp8", "mxfp4", "nf4", "lut3")


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(NAMES),
    rows=st.integers(1, 70),
    groups=st.integers(1, 5),
    symmetric=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_layouts_when_packed_and_unpacked_then_every_part_is_the_same(
    name, rows, groups, symmetric, seed
):
    """Every layout that takes a tensor gives it back to the last bit."""
    is_integer = name not in FORMAT_SCHEMES
    scheme = scheme_named(name, symmetric=symmetric or not is_integer).weight
    values = torch.randn(rows, 64 * groups, generator=torch.Generator().manual_seed(seed))
    if seed % 3 == 0:
        values = prune_2_4(values)
    if seed % 2 == 0 and is_integer:
        scheme = replace(scheme, scales=ScaleFormat(dtype=torch.bfloat16))
    tensor = QuantizedTensor.from_float(values, scheme)
    for layout in LAYOUTS.values():
        is_dense = layout.name == "sparse_2_4" and seed % 3
        if layout.refusal(tensor.form) or is_dense:
            continue
        back = layout.unpack(layout.pack(tensor.parts, tensor.form), tensor.form)
        assert back.keys() == tensor.parts.keys()
        for part, expected in tensor.parts.items():
            assert back[part].dtype == expected.dtype
            assert torch.equal(bits(back[part]), bits(expected)), (layout.name, part)


def bits(part):
    return part.contiguous().view(torch.uint8)


def test_layout_when_it_does_not_take_a_tensor_then_says_why():
    tensor = QuantizedTensor.from_float(torch.randn(4, 8), scheme_named("w8").weight)
    with pytest.raises(ConfigError, match="int8 has no gaps to take out"):
        tensor.to_layout("packed")


def test_layout_when_unknown_then_offers_the_near_one():
    with pytest.raises(ConfigError, match="packed"):
        layout_named("paked")


def test_layout_when_registered_then_is_found_and_its_name_is_taken():
    class Mine(Plain):
        name = "test_mine"

    try:
        register_layout(Mine())
        assert isinstance(layout_named("test_mine"), Mine)
        with pytest.raises(ConfigError, match="already"):
            register_layout(type("Other", (Plain,), {"name": "test_mine"})())
    finally:
        del LAYOUTS["test_mine"]
