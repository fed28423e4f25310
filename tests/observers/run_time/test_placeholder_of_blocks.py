"""Scales that are found at run time."""

from dataclasses import replace

import pytest
import torch

from pt2e_quant.core.errors import ConfigError, UnsupportedError
from pt2e_quant.core.formats.format_schemes import FORMAT_SCHEMES
from pt2e_quant.core.formats.scale_format import ScaleFormat
from pt2e_quant.core.scheme_names import scheme_named
from pt2e_quant.observers.run_time.placeholder import RunTimeScales


def test_run_time_scales_when_asked_for_qparams_then_refused():
    observer = RunTimeScales(FORMAT_SCHEMES["mxfp8"].input)
    x = torch.randn(2, 32)
    assert observer(x) is x
    with pytest.raises(UnsupportedError, match="at run time"):
        observer.calculate_qparams()


def test_run_time_scales_when_of_code_books_or_affine_integers_then_refused():
    dynamic = replace(FORMAT_SCHEMES["nf4"].weight, is_dynamic=True)
    affine = replace(scheme_named("int8_dynamic").input, scales=ScaleFormat(dtype=torch.float16))
    for scheme in (dynamic, affine):
        with pytest.raises(ConfigError, match="found at run time"):
            RunTimeScales(scheme)
