import pytest
import torch

from pt2e_quant.core.errors import ConfigError
from pt2e_quant.core.formats.blocks import block_lengths
from pt2e_quant.core.formats.format_schemes import FORMAT_SCHEMES, format_scheme_named
from pt2e_quant.core.formats.number_formats import FP4_E2M1, FP8_E4M3
from pt2e_quant.core.formats.scale_format import ScaleFormat
from pt2e_quant.core.granularity import PerGroup
from pt2e_quant.core.scheme_names import scheme_named
from pt2e_quant.core.scheme_size import bits_per_weight
from pt2e_quant.core.schemes import TensorScheme


@pytest.mark.parametrize("name", FORMAT_SCHEMES)
def test_scheme_when_named_then_weights_fit_themselves_and_say_their_blocks(name):
    scheme = scheme_named(name)
    assert scheme.name == name
    assert scheme.weight.fits(scheme.weight)
    assert len(block_lengths(scheme.weight.granularity, 2)) == 2
    assert (scheme.input is None) == (
        "weight_only" in name or name.startswith(("nf4", "lut", "w1"))
    )
    assert scheme.output is None
    assert bits_per_weight(scheme.weight) >= scheme.weight.bits


@pytest.mark.parametrize(
    ("name", "bits"),
    # OCP MX 1.0, table 1: 32 elements and 8 bits; NVFP4: 16 and 8; QLoRA, section 3: 0.127 bits
    [("mxfp8", 8.25), ("mxfp6", 6.25), ("mxfp4", 4.25), ("nvfp4", 4.5), ("nf4_double", 4.127)],
)
def test_bits_when_known_then_those(name, bits):
    assert bits_per_weight(scheme_named(name).weight) == pytest.approx(bits, abs=5e-4)


def test_names_when_grouped_then_of_weights_alone():
    assert format_scheme_named("nf4_g128").weight.granularity == PerGroup(128)
    assert format_scheme_named("w1.58_g64").weight.range == (-1, 1)
    for name in ("mxfp4_g16", "fp8_g32", "lut4_per_tensor_g8", "nvfp4_weight_only_g32"):
        assert format_scheme_named(name) is None


def test_schemes_when_format_or_scales_differ_then_do_not_fit():
    mx, nv = scheme_named("mxfp4").weight, scheme_named("nvfp4").weight
    assert not mx.fits(nv)
    plain = scheme_named("w4_g32").weight
    for scales in (ScaleFormat(dtype=torch.float16), ScaleFormat(double_group=256)):
        assert not scheme_named("w4_g32", scales=scales).weight.fits(plain)
    # A kernel that multiplies by any scale can multiply by a power of two.
    raised = scheme_named("w4_g32", scales=ScaleFormat(is_power_of_two=True)).weight
    assert raised.fits(plain)
    assert not plain.fits(raised)


def test_schemes_when_dtype_is_not_the_formats_then_refused():
    with pytest.raises(ValueError, match=r"has codes of torch\.uint4"):
        TensorScheme(dtype=torch.int8, granularity=PerGroup(32), symmetric=True, format=FP4_E2M1)
    with pytest.raises(ValueError, match="is symmetric"):
        TensorScheme(
            dtype=torch.float8_e4m3fn,
            granularity=PerGroup(32),
            symmetric=False,
            format=FP8_E4M3,
        )


@pytest.mark.parametrize(
    "fields",
    [
        {"dtype": torch.float64},
        {"double_group": 1},
        {"double_group": 64, "dtype": torch.float16},
        {"double_group": 64, "is_power_of_two": True},
        {"precision": torch.bfloat16, "is_power_of_two": True},
        {"precision": torch.float8_e4m3fn},
        {"precision": torch.float16, "dtype": torch.bfloat16},
    ],
)
def test_scales_when_fields_contradict_then_refused(fields):
    with pytest.raises(ConfigError):
        ScaleFormat(**fields)


def test_options_when_they_mean_nothing_then_refused():
    with pytest.raises(ConfigError, match="is symmetric"):
        scheme_named("mxfp4", symmetric=False)
    with pytest.raises(ConfigError, match='did you mean "mxfp4"'):
        scheme_named("mxfp44")
