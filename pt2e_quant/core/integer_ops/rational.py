"""Sigmoid, silu and tanh as ONNX Runtime computes them: quotients of polynomials, in float32.

The polynomials are Eigen's (generic_fast_tanh_float and its logistic twin). Products and sums are
fused as in MLAS's x86 kernels (onnxruntime/core/mlas/lib: logistic.cpp, tanh.cpp and their FMA3 and
AVX512F kernels); a fused one is taken in float64 here and rounded once more.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

_LOGISTIC_TOP = (
    4.37031012579801e-11,
    1.15627324459942e-07,
    6.08574864600143e-05,
    8.51377133304701e-03,
    2.48287947061529e-01,
)
_LOGISTIC_BOTTOM = (
    6.10247389755681e-13,
    5.76102136993427e-09,
    6.29106785017040e-06,
    1.70198817374094e-03,
    1.16817656904453e-01,
    9.93151921023180e-01,
)
_TANH_TOP = (
    -2.76076847742355e-16,
    2.00018790482477e-13,
    -8.60467152213735e-11,
    5.12229709037114e-08,
    1.48572235717979e-05,
    6.37261928875436e-04,
    4.89352455891786e-03,
)
_TANH_BOTTOM = (
    1.19825839466702e-06,
    1.18534705686654e-04,
    2.26843463243900e-03,
    4.89352518554385e-03,
)


def _polynomial(square: Tensor, coefficients: Sequence[float]) -> Tensor:
    """Horner's scheme by fused multiply-adds; the coefficient of the highest power is first."""
    real, *rest = (torch.tensor(c, dtype=torch.float32).double() for c in coefficients)
    for coefficient in rest:
        real = (real * square.double() + coefficient).float().double()
    return real.float()


def _odd(x: Tensor, limit: float, top: Sequence[float], bottom: Sequence[float]) -> Tensor:
    """The quotient x * top(x**2) / bottom(x**2) within limits."""
    value = x.clamp(-limit, limit)
    square = value * value
    return _polynomial(square, top) * value / _polynomial(square, bottom)


def logistic(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)), float32.

    >>> logistic(torch.tensor([0.0, 30.0]))
    tensor([0.5000, 1.0000])
    """
    return (_odd(x, 18.0, _LOGISTIC_TOP, _LOGISTIC_BOTTOM) + 0.5).clamp(0.0, 1.0)


def silu(x: Tensor) -> Tensor:
    """The product of x and its logistic, float32."""
    return x * logistic(x)


def tanh(x: Tensor) -> Tensor:
    """The hyperbolic tangent, float32."""
    return _odd(x, 9.0, _TANH_TOP, _TANH_BOTTOM)
