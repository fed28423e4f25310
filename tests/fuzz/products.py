"""Statements with weights: linears, convolutions, embeddings, norms, recurrent layers."""

from tests.fuzz.drawing import Drawing

__all__ = ["NORMS", "PRODUCTS", "RARE_PRODUCTS"]


def _spoiled(d: Drawing, letter: str, made: str, tensor: str = "weight") -> str:
    """A layer whose weights may be tiny, huge, dead in a channel, or with an outlier."""
    lines = ["{0} = " + made]
    kind = d.integer(0, 14)
    if kind == 0:
        lines.append("{0}." + tensor + f".data *= {10 ** d.rng.uniform(-6, 4):.1e}")
    elif kind == 1:
        lines.append("{0}." + tensor + ".data[-1] = 0.0")
    elif kind == 2:
        lines.append("{0}." + tensor + ".data.view(-1)[0] = 20.0")
    elif kind == 3:
        lines.append("{0}." + tensor + ".data.zero_()")
    elif kind == 4:
        lines.append("{0}." + tensor + ".data.abs_()")
    return d.attribute(letter, *lines)


def linear(d: Drawing) -> str | None:
    x = d.value(lambda v: v.dim() >= 1 and v.numel() > 0)
    if x is None or d.size(x, -1) is None:
        return None
    made = f"nn.Linear({d.size(x, -1)}, {d.width()}{', bias=False' if d.chance(0.3) else ''})"
    return f"{_spoiled(d, 'm', made)}({x})"


def convolution(d: Drawing) -> str | None:
    dims = d.choice(1, 1, 2, 2, 2, 3)
    x = d.value(lambda v: v.dim() in (dims + 1, dims + 2) and v.numel() > 0)
    if x is None:
        return None
    channels = d.size(x, -dims - 1)
    if channels is None:
        return None
    groups = d.choice(*[g for g in range(1, channels + 1) if channels % g == 0])
    groups = d.choice(1, 1, groups, channels)
    out = groups * d.choice(1, 1, 2, 3, 4, 5, 8, 10, 16)
    kernel = d.choice(1, 2, 3, 3, 3, 4, 5, 7, 8)
    if dims == 2 and d.chance(0.2):
        kernel = (kernel, d.choice(1, 3, 5))
    options = [f"{channels}, {min(out, 64 // groups * groups or groups)}, {kernel}"]
    options += [f"stride={d.choice(2, 2, 3)}"] * d.chance(0.3)
    padding = d.choice(1, 1, 2, 3, '"same"') if d.chance(0.6) else 0
    if padding == '"same"' and any("stride" in o for o in options):
        padding = 1
    options += [f"padding={padding}"] * bool(padding)
    options += ["dilation=2"] * d.chance(0.15)
    options += [f"groups={groups}"] * (groups > 1)
    options += ["bias=False"] * d.chance(0.3)
    if padding and d.chance(0.1):
        options.append(f'padding_mode="{d.choice("reflect", "circular", "replicate")}"')
    made = f"nn.Conv{dims}d({', '.join(options)})"
    return f"{_spoiled(d, 'm', made)}({x})"


def transposed_convolution(d: Drawing) -> str | None:
    dims = d.choice(1, 2, 2, 3)
    x = d.value(lambda v: v.dim() == dims + 2 and v.numel() > 0)
    if x is None or (channels := d.size(x, 1)) is None:
        return None
    groups = d.choice(1, 1, *[g for g in range(1, channels + 1) if channels % g == 0])
    options = [f"{channels}, {groups * d.choice(1, 2, 3, 5, 8)}, {d.choice(1, 2, 3, 4)}"]
    stride = d.choice(1, 2, 2, 3)
    options += [f"stride={stride}"] * (stride > 1)
    options += ["padding=1"] * d.chance(0.4)
    options += ["output_padding=1"] * (stride > 1 and d.chance(0.2))
    options += [f"groups={groups}"] * (groups > 1)
    options += ["bias=False"] * d.chance(0.3)
    made = f"nn.ConvTranspose{dims}d({', '.join(options)})"
    return f"{_spoiled(d, 'm', made)}({x})"


def embedding(d: Drawing) -> str | None:
    ids = d.value(lambda v: v.dim() in (1, 2, 3) and str(v.dtype) == "torch.int64", is_float=False)
    if ids is None:
        return None
    count = d.choice(11, 16, 50)
    options = f"{count}, {d.width()}" + (", padding_idx=0" if d.chance(0.3) else "")
    clipped = ids if d.chance(0.5) else f"{ids}.clamp(0, {count - 1})"
    return f"{_spoiled(d, 'm', f'nn.Embedding({options})')}({clipped})"


def parameter_product(d: Drawing) -> str | None:
    x = d.value(lambda v: v.dim() >= 2 and v.numel() > 0)
    if x is None or (k := d.size(x, -1)) is None:
        return None
    n = d.width()
    weight = d.attribute("p", "{0} = nn.Parameter(torch.randn(" + f"{k}, {n}))")
    forms = [
        f"{x} @ {weight}",
        f"torch.matmul({x}, {weight}) + 0.5",
        f"torch.einsum('...k,kn->...n', {x}, {weight})",
        f"F.linear({x}, {weight}.t())",
        f"F.linear({x}, {weight}.t() * 0.5)",
        f"torch.tensordot({x}, {weight}, dims=1)",
    ]
    if d.of(x).dim() == 2:
        forms += [
            f"torch.mm({x}, {weight})",
            f"torch.addmm(torch.ones({n}).to({x}), {x}, {weight})",
        ]
    return d.choice(*forms)


def tied(d: Drawing) -> str | None:
    """A linear that shares an earlier one's weight, or reads it transposed."""
    earlier = [n for n, lines in d.attributes.items() if "nn.Linear" in lines[0]]
    if not earlier:
        return None
    first = d.choice(*earlier)
    out, width = getattr(d.holder, first).weight.shape
    x = d.value(lambda v: v.dim() >= 1 and v.shape[-1] in (width, out) and v.numel() > 0)
    if x is None:
        return None
    if d.of(x).shape[-1] == width:
        if d.chance(0.5):
            return f"self.{first}({x})"
        lines = (f"{{0}} = nn.Linear({width}, {out})", f"{{0}}.weight = self.{first}.weight")
        return f"{d.attribute('m', *lines)}({x})"
    return f"F.linear({x}, self.{first}.weight.t())"


def shared(d: Drawing) -> str | None:
    """Call an earlier layer again."""
    names = [n for n in d.attributes if n.startswith("m")]
    x = d.ranked(2, 3, 4, 5)
    return f"self.{d.choice(*names)}({x})" if names and x else None


def two_values_product(d: Drawing) -> str | None:
    x = d.value(lambda v: v.dim() >= 2 and v.numel() > 0)
    if x is None:
        return None
    y = d.value(lambda v: v.dim() >= 2 and v.shape[-2:] == d.of(x).shape[-2:])
    right = f"{y}.transpose(-1, -2)" if d.chance(0.8) else f"{y}.mT"
    forms = [f"{x} @ {right}", f"torch.matmul({right}, {x})", f"torch.matmul({x}, {right}) * 0.1"]
    if d.of(x).dim() == 3:
        forms += [f"torch.bmm({x}, {right})", f"torch.einsum('bik,bjk->bij', {x}, {y})"]
        forms += [f"torch.baddbmm({x}.mean((1, 2), keepdim=True), {x}, {right}, beta=0.5)"]
    return d.choice(*forms)


def attention(d: Drawing) -> str | None:
    x = d.value(lambda v: v.dim() in (3, 4) and v.numel() > 0)
    if x is None:
        return None
    y = d.value(lambda v: v.shape == d.of(x).shape) or x
    causal = ", is_causal=True" if d.chance(0.3) else ""
    return f"F.scaled_dot_product_attention({x}, {y}, {d.choice(x, y)}{causal})"


def multihead(d: Drawing) -> str | None:
    x = d.ranked(3)
    if x is None or (width := d.size(x, -1)) is None:
        return None
    heads = d.choice(*[h for h in (1, 2, 3, 4) if width % h == 0])
    m = d.attribute("m", f"{{0}} = nn.MultiheadAttention({width}, {heads}, batch_first=True)")
    return f"{m}({x}, {x}, {x}, need_weights={d.chance(0.5)})[0]"


def recurrent(d: Drawing) -> str | None:
    x = d.ranked(3)
    if x is None or (width := d.size(x, -1)) is None or (d.size(x, 1) or 99) > 6:
        return None
    options = f"{width}, {d.choice(4, 8, 12)}, batch_first=True"
    options += ", bidirectional=True" * d.chance(0.3)
    m = d.attribute("m", f"{{0}} = nn.{d.choice('LSTM', 'GRU', 'RNN')}({options})")
    return f"{m}({x})[0]"


def cell(d: Drawing) -> str | None:
    x = d.ranked(2)
    if x is None or (width := d.size(x, -1)) is None:
        return None
    m = d.attribute("m", f"{{0}} = nn.{d.choice('GRUCell', 'RNNCell')}({width}, {d.choice(4, 8)})")
    return f"{m}({x})"


def bilinear(d: Drawing) -> str | None:
    x = d.ranked(2, 3)
    if x is None or (width := d.size(x, -1)) is None:
        return None
    return f"{d.attribute('m', f'{{0}} = nn.Bilinear({width}, {width}, {d.width()})')}({x}, {x})"


def run_time_convolution(d: Drawing) -> str | None:
    x = d.ranked(3)
    if x is None or (c := d.size(x, 1)) is None:
        return None
    weight = d.attribute("p", "{0} = nn.Parameter(torch.randn(" + f"4, {c}, 3))")
    return f"F.conv1d({x}, {weight} * {x}.mean(), padding=1)"


def norm(d: Drawing) -> str | None:
    x = d.value(lambda v: v.dim() in (2, 3, 4, 5) and v.numel() > 0)
    if x is None or (width := d.size(x, -1)) is None or (channels := d.size(x, 1)) is None:
        return None
    rank = d.of(x).dim()
    forms = [f"nn.LayerNorm({width})", f"nn.LayerNorm({width}, elementwise_affine=False)"]
    forms += [f"nn.RMSNorm({width})"]
    if rank > 2:
        groups = d.choice(*[g for g in range(1, channels + 1) if channels % g == 0])
        forms += [f"nn.GroupNorm({groups}, {channels})"]
        forms += [f"nn.InstanceNorm{rank - 2}d({channels}, affine={d.chance(0.5)})"]
    return f"{d.attribute('m', '{0} = ' + d.choice(*forms))}({x})"


def batch_norm(d: Drawing) -> str | None:
    x = d.value(lambda v: v.dim() in (2, 3, 4, 5) and v.numel() > 0)
    if x is None or (channels := d.size(x, 1)) is None:
        return None
    dims = max(d.of(x).dim() - 2, 1)
    affine = ", affine=False" * d.chance(0.2)
    lines = [f"{{0}} = nn.BatchNorm{dims}d({channels}{affine})"]
    lines += ["{0}.running_mean.normal_()", "{0}.running_var.uniform_(0.1, 2.0)"]
    if not affine and d.chance(0.3):
        lines.append("{0}.weight.data[0] = " + d.choice("0.0", "-1.0", "1e-6"))
    return f"{d.attribute('m', *lines)}({x})"


def functional_norm(d: Drawing) -> str | None:
    x = d.ranked(2, 3, 4)
    if x is None:
        return None
    return d.choice(
        f"F.normalize({x}, dim=-1)",
        f"{x} * torch.rsqrt({x}.pow(2).mean(-1, keepdim=True) + 1e-6)",
        f"({x} - {x}.mean(-1, keepdim=True)) / ({x}.std(-1, keepdim=True) + 1e-3)",
        f"F.local_response_norm({x}, 2)",
        f"F.layer_norm({x}, {x}.shape[-1:])",
        f"F.instance_norm({x})",
    )


PRODUCTS = {
    linear: 8,
    convolution: 8,
    transposed_convolution: 2,
    parameter_product: 2,
    embedding: 4,
}
RARE_PRODUCTS = {
    tied: 2,
    shared: 2,
    two_values_product: 3,
    attention: 2,
    multihead: 0.7,
    recurrent: 0.15,
    cell: 0.4,
    bilinear: 0.4,
    run_time_convolution: 0.4,
}
NORMS = {norm: 2, batch_norm: 3, functional_norm: 1}
