"""A scheme that a backend has no recipe for is refused with the nearest that it has."""

import pytest

from pt2e_quant.backends import get
from pt2e_quant.core.errors import ConfigError


@pytest.mark.parametrize(
    ("scheme", "nearest"),
    [
        ("a16w8", "int8"),
        ("w3_g64", "w4_g64"),
        ("w8", "w4"),
        ("mxfp8", "fp8_dynamic"),
        ("nf4", "w4_g64"),
    ],
)
def test_a_scheme_without_kernels_is_refused_with_the_nearest(scheme, nearest):
    with pytest.raises(ConfigError, match=f'no kernel for scheme "{scheme}"') as caught:
        get("cuda").quantizer(scheme)
    assert f'the nearest it runs is "{nearest}"' in str(caught.value)
