"""Forms of softmax, of masked scores too, and of log_softmax."""

import math
from typing import Any

from torch import Tensor

from pt2e_quant.core.integer_ops.profiles import Functions
from pt2e_quant.core.integer_ops.softmax import (
    MOST_OUT_BITS,
    LogSoftmax,
    Softmax,
    log_softmax_factors,
    softmax_factors,
)
from pt2e_quant.graph.ops import LOG_SOFTMAX, SOFTMAX
from pt2e_quant.passes.reference.forms.site import (
    Declined,
    IntegerForm,
    Operand,
    Output,
    Site,
    is_boolean,
)

_VANISHES = 104.0
"""exp(-104) is below the least float32."""


def _softmax(site: Site[Any]) -> Any:
    name = "self" if "self" in site.arguments else "input"
    x, output = site.operand(name), site.required_output()
    factors = softmax_factors(x.qparams.scale_float, _softmax_scale(site, x, output))
    is_far = factors[2] > 1 << MOST_OUT_BITS or factors[3] > 30
    if is_far or factors[0] * (x.reach * 2) >= 1 << 62:
        raise Declined("the scales of its input and output are too far apart")
    out = output.range
    limits = out.zero_point, out.low, out.high, out.storage
    mask = site.arguments.get("mask")
    seen = () if mask is None else (_seen(site, x, mask),)
    return site.call(Softmax, x.value, site.arguments["dim"], *factors, *limits, *seen)


def _log_softmax(site: Site[Any]) -> Any:
    name = "self" if "self" in site.arguments else "input"
    x, output = site.operand(name), site.required_output()
    scales = x.qparams.scale_float, output.qparams.scale_float
    factors = log_softmax_factors(*scales, x.reach)
    if factors is None:
        raise Declined("the scales of its input and output are too far apart")
    out = output.range
    limits = out.zero_point, out.low, out.high, out.storage
    return site.call(LogSoftmax, x.value, site.arguments["dim"], *factors, *limits)


def _softmax_scale(site: Site[Any], x: Operand[Any], output: Output) -> float:
    """The output's scale; ONNX Runtime has the inverse of a whole number (qlinear_softmax.cc)."""
    scale = output.qparams.scale_float
    is_byte = max(x.storage.itemsize, output.range.storage.itemsize) == 1 and scale <= 1.0
    if is_byte and site.arithmetic.profile.functions is Functions.MLAS:
        return 1.0 / math.floor(float(1.0 / output.qparams.scale))
    return scale


def _seen(site: Site[Any], x: Operand[Any], mask: Any) -> Any:
    """Return the scores that an additive mask keeps: run-time booleans, or a constant's zeros."""
    if is_boolean(mask):
        return mask
    if not isinstance(mask, Tensor):
        raise Declined("it adds values of run time that may be no mask")
    # So low that softmax gives 0 wherever another score is seen.
    low = -(2 * x.reach * x.qparams.scale_float + _VANISHES)
    seen = mask == 0
    if not bool((seen | (mask <= low)).all()):
        raise Declined("it adds a constant that is no mask")
    return site.hold(seen, "seen")


SOFTMAX_FORMS = (
    IntegerForm(name="softmax", operators=SOFTMAX, write=_softmax),
    IntegerForm(name="log_softmax", operators=LOG_SOFTMAX, write=_log_softmax),
)
"""Softmax and its logarithm."""
