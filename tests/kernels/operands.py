"""Operands of fused operators, drawn: extreme integers and zero points are as likely as others."""

import torch
from hypothesis import strategies as st

from pt2e_quant.kernels.epilogue.epilogue import Activation

__all__ = [
    "EXACT_ACTIVATIONS",
    "FLOATS",
    "epilogues",
    "float_rows",
    "integers",
    "linear_operands",
    "outputs",
    "scales",
]

# Nothing but exp and erf is rounded otherwise than in the definition.
EXACT_ACTIVATIONS = set(Activation) - {
    Activation.GELU,
    Activation.GELU_TANH,
    Activation.SILU,
    Activation.SIGMOID,
    Activation.TANH,
}
FLOATS = (torch.float32, torch.float16, torch.bfloat16)

_LIMITS = {Activation.CLAMP: [-0.5, 6.0], Activation.LEAKY_RELU: [0.1]}


@st.composite
def integers(draw, shape, low=-128, high=127, dtype=torch.int8):
    """Integers of a shape: all least, all greatest, or any."""
    kind = draw(st.sampled_from(["low", "high", "any"]))
    if kind != "any":
        return torch.full(shape, low if kind == "low" else high, dtype=dtype)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    return torch.randint(low, high + 1, shape, dtype=dtype, generator=generator)


@st.composite
def float_rows(draw, shape, dtypes=FLOATS):
    """Rows of floats: of a size, of one sign, of halves that tie, or all zero."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    x = torch.randn(shape, generator=generator) * draw(st.sampled_from([1e-3, 1.0, 20.0]))
    kind = draw(st.sampled_from(["any", "positive", "negative", "halves", "zero"]))
    if kind == "halves" and shape:  # exact in every dtype, and steps of 1/4 put many in the middle
        x = torch.randint(-128, 128, shape, generator=generator) / 4.0
        x[..., 0], x[..., -1] = -32.0, 31.75
    made = {"positive": x.abs(), "negative": -x.abs(), "zero": x * 0.0}.get(kind, x)
    return made.to(draw(st.sampled_from(dtypes)))


@st.composite
def scales(draw, count, magnitude):
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    return (torch.rand(count, generator=generator) + 0.01) * magnitude


@st.composite
def linear_operands(draw, M, N, K, *, per_row):
    """The tensors of int8_linear before its epilogue."""
    x, weight = draw(integers((M, K))), draw(integers((N, K)))
    count = M if per_row else 1
    return (
        x,
        draw(scales(count, 0.05)),
        draw(integers((count,), dtype=torch.int32)),
        weight,
        draw(scales(N, 0.01)),
        weight.sum(1, dtype=torch.int32),
    )


@st.composite
def outputs(draw):
    """Arguments of an epilogue from the activation on."""
    activation = draw(st.sampled_from(list(Activation)))
    return {
        "activation": str(activation),
        "limits": _LIMITS.get(activation, []),
        "out_dtype": draw(st.sampled_from([torch.int8, *FLOATS])),
        "out_scale": draw(st.sampled_from([0.01, 0.37, 3.0])),
        "out_zero_point": draw(st.sampled_from([-128, -3, 0, 127])),
        "out_min": draw(st.sampled_from([-128, -127])),
    }


@st.composite
def epilogues(draw, shape, channel_axis=-1):
    """Arguments of an epilogue for a result of a shape."""
    found = draw(outputs())
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    if draw(st.booleans()):
        found["bias"] = torch.randn(shape[channel_axis], generator=generator)
    residual = draw(st.sampled_from(["none", "integer", "float"]))
    if residual == "integer":
        found["residual"] = draw(integers(shape))
        found["residual_scale"] = 0.03
        found["residual_zero_point"] = draw(st.sampled_from([-128, 5, 127]))
    elif residual == "float":
        found["residual"] = torch.randn(shape, generator=generator)
    return found
