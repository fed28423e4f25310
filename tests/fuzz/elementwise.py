"""Statements that keep or reduce shapes: activations, arithmetic, reductions, casts."""

from tests.fuzz.drawing import Drawing

__all__ = ["ELEMENTWISE"]

_ACTIVATIONS = (
    *("F.relu({})", "F.relu({})", "F.relu6({})", "F.gelu({})", 'F.gelu({}, approximate="tanh")'),
    *("F.silu({})", "F.hardswish({})", "F.hardsigmoid({})", "F.leaky_relu({})", "F.mish({})"),
    *("F.leaky_relu({}, 0.3)", "F.elu({})", "F.elu({}, 0.5)", "F.selu({})", "F.celu({}, 1.3)"),
    *("F.hardtanh({})", "F.hardtanh({}, -0.5, 2.0)", "F.softplus({})", "F.softsign({})"),
    *("F.tanhshrink({})", "F.softshrink({})", "F.hardshrink({})", "F.logsigmoid({})"),
    *("torch.sigmoid({})", "torch.tanh({})", "F.threshold({}, 0.1, 0.0)", "F.glu({})"),
    *("{}.clamp(0, 1)", "{}.clamp(min=-0.5)", "{}.clamp(max=0.7)", "F.softmin({}, -1)"),
    *(
        "torch.relu_({}.clone())",
        "F.dropout({}, training=False)",
        "F.rrelu({})",
        "F.hardtanh({}, 0, 6)",
    ),
)
_UNARIES = (
    *("abs", "neg", "exp", "expm1", "floor", "ceil", "round", "sign", "sin", "cos", "atan", "erf"),
    *("square", "trunc", "frac", "sinh", "asinh", "sgn", "exp2", "sinc", "nan_to_num", "positive"),
)
_BINARIES = (
    *("{} + {}", "{} + {}", "{} - {}", "{} * {}", "{} * {}", "torch.minimum({}, {})"),
    *("torch.maximum({}, {})", "{} / ({}.abs() + 0.5)", "torch.add({}, {}, alpha=2)"),
    *("torch.atan2({}, {})", "torch.sub({}, {}, alpha=0.5)", "torch.rsub({}, {})"),
    *("torch.lerp({}, {}, 0.3)", "torch.where({0} > {1}, {0}, 0.1)", "torch.fmod({}, {} + 3.7)"),
    *(
        "torch.hypot({}, {})",
        "torch.logaddexp({}, {})",
        "torch.div({}, {} + 9.5, rounding_mode='floor')",
    ),
    *("torch.addcmul({0}, {0}, {1}, value=0.5)", "{0} * torch.sigmoid({1})", "torch.dist({}, {})"),
    *(
        "torch.copysign({}, {})",
        "torch.heaviside({}, {})",
        "torch.float_power({0}.abs() + 0.1, 2) + {1}",
    ),
)
_REDUCTIONS = (
    *("{}.mean({dim})", "{}.mean({dim}, keepdim=True)", "{}.sum({dim})", "{}.amax({dim})"),
    *(
        "{}.amin({dim})",
        "{}.max({dim}).values",
        "{}.min({dim})[0]",
        "{}.std({dim})",
        "{}.var({dim})",
    ),
    *("{}.prod({dim})", "{}.cumsum({dim})", "torch.logsumexp({}, {dim})", "{}.norm(dim={dim})"),
    *("torch.softmax({}, {dim})", "F.log_softmax({}, {dim})", "torch.softmax({}, {dim})"),
    *(
        "{}.mean()",
        "{}.sum(({dim}, -1))",
        "{}.max()",
        "{}.median({dim}).values",
        "{}.cummax({dim})[0]",
    ),
    *(
        "torch.linalg.vector_norm({}, dim={dim})",
        "torch.var_mean({}, {dim})[0]",
        "{}.aminmax(dim={dim})[0]",
    ),
    *(
        "{}.flatten(1).mean(1)",
        "{}.mean((-1, -2))",
        "{}.mean((-1, -2), keepdim=True)",
        "{}.diff(dim={dim})",
    ),
)


def activation(d: Drawing) -> str | None:
    x = d.value(lambda v: v.numel() > 0)
    return x and d.choice(*_ACTIVATIONS).format(x)


def prelu(d: Drawing) -> str | None:
    x = d.ranked(2, 3, 4)
    if x is None or (channels := d.size(x, 1)) is None:
        return None
    return f"{d.attribute('m', f'{{0}} = nn.PReLU({d.choice(1, channels)})')}({x})"


def unary(d: Drawing) -> str | None:
    x = d.value(lambda v: True)
    if x is None:
        return None
    if d.chance(0.3):
        return d.choice(
            f"torch.sqrt({x}.abs())",
            f"torch.log({x}.abs() + 0.1)",
            f"torch.log1p({x}.abs())",
            f"torch.rsqrt({x}.abs() + 0.1)",
            f"torch.reciprocal({x}.abs() + 0.5)",
            f"{x} ** {d.choice(2, 3)}",
            f"{x}.abs() ** 0.5",
            f"torch.acos({x}.clamp(-0.9, 0.9))",
            f"1.0 / (1.0 + torch.exp(-{x}))",
        )
    return f"torch.{d.choice(*_UNARIES)}({x})"


def number_binary(d: Drawing) -> str | None:
    x = d.value(lambda v: True)
    n = d.number()
    forms = (f"{x} + {n}", f"{x} * {n}", f"{n} - {x}", f"{x} / {n or 1.0}", f"{x} - {n}")
    return x and d.choice(*forms, f"torch.maximum({x}, torch.tensor({n}).to({x}))", f"{x} // 0.25")


def constant_binary(d: Drawing) -> str | None:
    """Arithmetic with a parameter or a buffer, of a channel or of all elements."""
    x = d.value(lambda v: v.dim() > 0 and v.numel() > 0)
    if x is None or (width := d.size(x, -1)) is None:
        return None
    shape, rank = d.choice(f"{width}", "1", f"1, {width}"), d.of(x).dim()
    if rank > 2 and (channels := d.size(x, 1)) is not None and d.chance(0.5):
        shape = f"{channels}" + ", 1" * (rank - 2)
    made = d.choice("torch.randn", "torch.rand", "torch.ones", "torch.zeros")
    if d.chance(0.5):
        c = d.attribute("p", f"{{0}} = nn.Parameter({made}({shape}))")
    else:
        name = f"c{len(d.attributes)}"
        c = d.attribute("c", f'self.register_buffer("{name}", {made}({shape}))')
    return d.choice("{} + {}", "{} * {}", "{} - {}", "torch.maximum({}, {})").format(x, c)


def binary(d: Drawing) -> str | None:
    x = d.value(lambda v: True)
    if x is None:
        return None
    shape = d.of(x).shape
    y = d.value(lambda v: v.shape == shape)
    if d.chance(0.3):
        y = d.value(
            lambda v: all(
                a == b or 1 in (a, b) for a, b in zip(v.shape[::-1], shape[::-1], strict=False)
            )
        )
    return d.choice(*_BINARIES).format(x, y)


def reduction(d: Drawing) -> str | None:
    x = d.value(lambda v: v.dim() > 0)
    if x is None:
        return None
    dim = d.integer(0, d.of(x).dim() - 1)
    return d.choice(*_REDUCTIONS).format(x, dim=d.choice(dim, dim, -1))


def compare(d: Drawing) -> str | None:
    x = d.value(lambda v: v.numel() > 0)
    y = x and d.value(lambda v: v.shape == d.of(x).shape)
    forms = ("{0} > {1}", "{0} <= 0.3", "{0} != {1}", "torch.isfinite({0})", "{0}.argmax(-1)")
    forms += ("{0}.to(torch.int64)", "({0} > 0).sum(-1)", "({0} > {1}).any()", "({0} * 3).int()")
    forms += ("{0}.argsort(-1)", "torch.topk({0}, 1).indices", "({0} >= 0).logical_not()")
    return x and d.choice(*forms).format(x, y)


def integers(d: Drawing) -> str | None:
    x = d.value(lambda v: v.numel() > 0, is_float=False)
    forms = ("{}.to({p})", "{} + 1", "{}.float().to({p}) * 0.1", "{}.sum()", "~({} > 2)")
    forms += (
        "{} % 5",
        "{} // 2",
        "({} == 1).to({p})",
        "F.one_hot({}.clamp(0, 4).long(), 5).to({p})",
    )
    forms += ("{} * 2 - 1", "{}.clamp(0, 3)", "{}.cumsum(-1)", "-{}", "{} & 3", "{}.max()")
    return x and d.choice(*forms).format(x, p=d.dtype)


def mask(d: Drawing) -> str | None:
    x = d.value(lambda v: v.dim() >= 2 and v.numel() > 0)
    if x is None:
        return None
    flags = d.value(lambda v: str(v.dtype) == "torch.bool", is_float=False)
    n, m = f"{x}.shape[-2]", f"{x}.shape[-1]"
    causal = f"torch.ones({n}, {m}).tril().bool()"
    return d.choice(
        f"{x}.masked_fill({flags or causal}, float('-inf')).softmax(-1)",
        f"{x}.masked_fill({causal}, -1e9)",
        f"{x}.masked_fill({x} > 0, 0.0)",
        f"torch.where({flags or causal}, {x}, 0.0)",
        f"torch.where({causal}, {x}, torch.finfo({x}.dtype).min).softmax(-1)",
        f"torch.softmax({x} + torch.triu(torch.full(({n}, {m}), float('-inf')), 1), -1)",
        f"{x} * {flags or causal}",
    )


def cast(d: Drawing) -> str | None:
    x = d.value(lambda v: v.numel() > 0)
    dtype = d.choice("torch.float64", "torch.float16", "torch.bfloat16")
    forms = ("{}.to({t}).to({p})", "({}.to({t}) * 2).to({p})", "{}.to({t}).relu().to({p})")
    return x and d.choice(*forms).format(x, t=dtype, p=d.dtype)


ELEMENTWISE = {
    activation: 8,
    prelu: 0.7,
    unary: 2,
    number_binary: 3,
    constant_binary: 2,
    binary: 6,
    reduction: 4,
    compare: 0.7,
    integers: 1,
    mask: 1,
    cast: 0.5,
}
