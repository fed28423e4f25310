"""Statements with state, with control flow, and blocks of several statements."""

from tests.fuzz.drawing import Drawing

__all__ = ["BLOCKS", "CONTROL", "WRITES"]


def written_buffer(d: Drawing) -> str | None:
    """A buffer that the call writes; later statements may read it."""
    x = d.value(lambda v: 0 < v.dim() < 5 and 0 < v.numel() <= 512)
    if x is None or any(d.size(x, i) is None for i in range(d.of(x).dim())):
        return None
    shape = tuple(d.of(x).shape)
    name = f"b{len(d.attributes)}"
    made = f'self.register_buffer("{name}", torch.zeros({shape}, dtype={d.dtype}))'
    buffer = d.attribute("b", made)
    before = f"{buffer} + {x}" if d.chance(0.4) else None
    if before and d.add(before) is None:
        return None
    forms = [
        f"{buffer}.add_({x})",
        f"{buffer}.copy_({x})",
        f"{buffer}.mul_(0.9).add_({x}, alpha=0.1)",
    ]
    if len(shape) > 0 and shape[0] > 1:
        forms += [f"{buffer}[0] = {x}[0]", f"{buffer}[:-1] = {buffer}[1:].clone()"]
        forms += [f"{buffer}[1:] = {x}[1:]"]
    text = d.choice(*forms)
    d.pending = [n for n in d.pending if n != buffer.removeprefix("self.")]
    if d.add(text, writes=True) is None:
        return None
    return f"{buffer} {d.choice('+', '*', '-')} {x}" if d.chance(0.6) else f"{buffer}.clone()"


def counter(d: Drawing) -> str | None:
    """An integer buffer that counts calls."""
    name = f"b{len(d.attributes)}"
    made = f'self.register_buffer("{name}", torch.zeros(1, dtype=torch.int64))'
    buffer = d.attribute("b", made)
    d.pending = []
    d.add(f"{buffer}.add_(1)", writes=True)
    x = d.ranked(1, 2, 3)
    return f"{x} * {buffer}" if x and d.chance(0.5) else f"{buffer} * 2"


def in_place(d: Drawing) -> str | None:
    x = d.value(lambda v: v.dim() > 0 and v.numel() > 0)
    if x is None:
        return None
    copy = d.add(f"{x}.clone()")
    if copy is None:
        return None
    forms = [f"{copy}[0] = 0.5", f"{copy}.add_(1.0)", f"{copy}[..., -1] = {x}[..., 0]"]
    forms += [f"{copy}.relu_()", f"{copy}[..., :1].mul_(2.0)", f"{copy}.clamp_(-0.5, 0.5)"]
    forms += [f"{copy}.masked_fill_({x} > 0.5, 0.0)", f"{copy}.view(-1)[0] = 1.0"]
    d.add(d.choice(*forms), writes=True)
    return f"{copy} + {x}"


def written_input(d: Drawing) -> str | None:
    """Write one of the model's inputs."""
    names = [i.name for i in d.inputs if d.of(i.name).is_floating_point() and d.of(i.name).numel()]
    if not names:
        return None
    x = d.choice(*names)
    d.add(d.choice(f"{x}.mul_(0.5)", f"{x}[..., :1] = 0.25", f"{x}.add_(1.0)"), writes=True)
    return f"{x} * 1.5"


def _branch(d: Drawing, x: str) -> str:
    """A body that keeps the shape: an operator, or a layer as wide as its input."""
    width = d.size(x, -1)
    if width is not None and d.chance(0.6):
        layer = d.attribute("m", f"{{0}} = nn.Linear({width}, {width})")
        return d.choice(f"{layer}(a)", f"torch.relu({layer}(a))", f"{layer}(a) + a")
    return d.choice("a * 2.0", "torch.relu(a)", "a - 1.0", "torch.tanh(a)", "a.sin() + 1")


def conditional(d: Drawing) -> str | None:
    x = d.ranked(2, 3, 4)
    if x is None:
        return None
    condition = d.choice(f"{x}.sum() > 0", f"{x}.mean() < 0.1", f"{x}.max() > 1.0")
    one, other = _branch(d, x), _branch(d, x)
    return f"torch.cond({condition}, lambda a: {one}, lambda a: {other}, ({x},))"


def while_loop(d: Drawing) -> str | None:
    x = d.ranked(2, 3)
    if x is None:
        return None
    body = f"lambda i, a: (i + 1, torch.tanh({_branch(d, x)}))"
    return (
        "torch._higher_order_ops.while_loop("
        f"lambda i, a: i < {d.choice(1, 2, 3)}, {body}, (torch.tensor(0), {x}.clone()))[1]"
    )


def scan(d: Drawing) -> str | None:
    x = d.ranked(3)
    if x is None or d.size(x, 1) is None:
        return None
    body = f"(lambda a: (a, a * 1.0))(torch.tanh({_branch(d, x)} + s))"
    return (
        f"torch._higher_order_ops.scan(lambda a, s: {body}, "
        f"torch.zeros_like({x}[:, 0]), {x}, dim=1)[1]"
    )


def residual(d: Drawing) -> str | None:
    """norm -> linear -> activation -> linear, added to the input."""
    x = d.ranked(2, 3, 4)
    if x is None or (width := d.size(x, -1)) is None:
        return None
    inner = d.width()
    first = d.attribute("m", f"{{0}} = nn.Linear({width}, {inner})")
    last = d.attribute("m", f"{{0}} = nn.Linear({inner}, {width})")
    norm = d.attribute("m", f"{{0}} = nn.LayerNorm({width})") if d.chance(0.5) else ""
    act = d.choice("F.relu", "F.gelu", "F.silu", "torch.tanh")
    return f"{x} + {last}({act}({first}({norm}({x}))))"


def convolution_block(d: Drawing) -> str | None:
    """conv -> batch norm -> activation, perhaps added to another value."""
    dims = d.choice(1, 2, 2, 2, 3)
    x = d.value(lambda v: v.dim() == dims + 2 and v.numel() > 0)
    if x is None or (channels := d.size(x, 1)) is None:
        return None
    groups = d.choice(1, 1, channels, *[g for g in (2, 3, 4, 5, 6) if channels % g == 0])
    out = channels if d.chance(0.6) else groups * d.choice(1, 2, 3, 5, 10)
    kernel = d.choice(1, 3, 3, 5)
    options = f"{channels}, {out}, {kernel}, padding={kernel // 2}, groups={groups}"
    options += d.choice("", "", ", stride=2")
    conv = d.attribute("m", f"{{0}} = nn.Conv{dims}d({options})")
    norm = d.attribute(
        "m",
        f"{{0}} = nn.BatchNorm{dims}d({out})",
        "{0}.running_mean.normal_()",
        "{0}.running_var.uniform_(0.2, 2.0)",
    )
    text = f"{norm}({conv}({x}))" if d.chance(0.8) else f"{conv}({x})"
    act = d.choice("F.relu({})", "F.relu6({})", "F.silu({})", "F.hardswish({})", "{}", "F.gelu({})")
    if out == channels and "stride" not in options and d.chance(0.4):
        return d.choice(f"{act.format(text)} + {x}", f"F.relu({text} + {x})")
    return act.format(text)


def squeeze_excite(d: Drawing) -> str | None:
    x = d.ranked(4)
    if x is None or (channels := d.size(x, 1)) is None:
        return None
    first = d.attribute("m", f"{{0}} = nn.Conv2d({channels}, {d.choice(1, 2, 4)}, 1)")
    last = d.attribute(
        "m", f"{{0}} = nn.Conv2d({getattr(d.holder, first[5:]).out_channels}, {channels}, 1)"
    )
    pooled = d.choice(f"{x}.mean((2, 3), keepdim=True)", f"F.adaptive_avg_pool2d({x}, 1)")
    gate = d.choice("torch.sigmoid", "F.hardsigmoid")
    return f"{x} * {gate}({last}(F.relu({first}({pooled}))))"


def attention_block(d: Drawing) -> str | None:
    x = d.ranked(3)
    if x is None or (width := d.size(x, -1)) is None:
        return None
    inner = d.choice(4, 8, 12)
    q, k, v = (d.attribute("m", f"{{0}} = nn.Linear({width}, {inner})") for _ in range(3))
    out = d.attribute("m", f"{{0}} = nn.Linear({inner}, {width})")
    scores = f"({q}({x}) @ {k}({x}).transpose(-1, -2)) / {inner**0.5:.3f}"
    if d.chance(0.4):
        later = f"torch.ones({x}.shape[1], {x}.shape[1]).triu(1).bool()"
        scores = f"({scores}).masked_fill({later}, float('-inf'))"
    return f"{out}(torch.softmax({scores}, -1) @ {v}({x})) + {x}"


def gated(d: Drawing) -> str | None:
    x = d.ranked(2, 3, 4)
    if x is None or (width := d.size(x, -1)) is None:
        return None
    inner = d.width()
    a, b = (d.attribute("m", f"{{0}} = nn.Linear({width}, {inner})") for _ in range(2))
    gate = d.choice("F.silu", "torch.sigmoid", "F.gelu", "torch.tanh")
    return f"{gate}({a}({x})) * {b}({x})"


def nested_control(d: Drawing) -> str | None:
    """A condition in a branch of another one, or in the body of a loop."""
    x = d.ranked(2, 3)
    if x is None:
        return None
    one, two, three = (_branch(d, x) for _ in range(3))
    inner = f"torch.cond(a.mean() > 0, lambda a: {one}, lambda a: {two}, (a,))"
    if d.chance(0.5):
        return f"torch.cond({x}.sum() > 0, lambda a: {inner}, lambda a: {three}, ({x},))"
    body = f"lambda i, a: (i + 1, torch.tanh({inner}))"
    return (
        "torch._higher_order_ops.while_loop("
        f"lambda i, a: i < 2, {body}, (torch.tensor(0), {x}.clone()))[1]"
    )


WRITES = {written_buffer: 1, counter: 0.3, in_place: 1, written_input: 0.3}
CONTROL = {conditional: 1, while_loop: 0.5, scan: 0.4, nested_control: 0.4}
BLOCKS = {
    residual: 2,
    convolution_block: 4,
    squeeze_excite: 1,
    attention_block: 1.5,
    gated: 1,
}
