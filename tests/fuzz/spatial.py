"""Statements between positions: indices, windows, samplings, and layers at several sizes."""

from tests.fuzz.drawing import Drawing

__all__ = ["POSITIONS", "SEVERAL_SIZES"]


def einsum(d: Drawing) -> str | None:
    """A sum over named axes of two values, of a value and a parameter, or of one alone."""
    x = d.ranked(2, 3, 4)
    if x is None:
        return None
    rank = d.of(x).dim()
    y = d.value(lambda v: v.shape == d.of(x).shape) or x
    forms = {
        2: ("bi,bi->b", "bi,bj->bij", "ij,kj->ik", "bi,bi->bi"),
        3: ("bti,bsi->bts", "bti,bti->bt", "btc,btd->bcd", "bti,bsi->sbt", "bit,bjt->bij"),
        4: ("bhqd,bhkd->bhqk", "bchw,bchw->bhw", "bchw,bdhw->bcd", "bhqd,bhkd->bqhk"),
    }
    if (width := d.size(x, -1)) is not None and d.chance(0.4):
        n = d.width()
        weight = d.attribute("p", "{0} = nn.Parameter(torch.randn(" + f"{n}, {width}))")
        left = "bthw"[: rank - 1]
        form = d.choice(f"{left}i,oi->{left}o", f"{left}i,oi->o{left}", f"{left}i,oi->{left}")
        return f"torch.einsum('{form}', {x}, {weight})"
    alone = {2: "ij->ji", 3: "bij->bj", 4: "bchw->bwc"}[rank]
    if d.chance(0.15):
        return f"torch.einsum('{alone}', {x})"
    return f"torch.einsum('{d.choice(*forms[rank])}', {x}, {y})"


def placed(d: Drawing) -> str | None:
    """Read or write by computed positions."""
    x = d.ranked(1, 2, 3, 4)
    if x is None:
        return None
    dim = d.integer(0, d.of(x).dim() - 1)
    order = f"{x}.argsort({dim})"
    one = f"torch.tensor([{d.choice(0, -1)}])"
    first = f"torch.tensor([0]), {x}[:1]"
    forms = [
        f"torch.zeros_like({x}).scatter_add({dim}, {order}, {x})",
        f"torch.zeros_like({x}).scatter({dim}, {order}, {x})",
        f"{x}.scatter_reduce({dim}, {order} // 2, {x}, 'amax')",
        f"{x}.index_copy(0, {first} * 2)",
        f"{x}.index_put(({one},), torch.tensor(0.5).to({x}))",
        f"{x}.index_put(({one},), torch.tensor(0.5).to({x}), accumulate=True)",
        f"{x}.masked_scatter({x} > 0, {x}.neg())",
        f"torch.select_scatter({x}, {x}[0] * 2, 0, 0)",
        f"torch.slice_scatter({x}, {x}[..., :1] - 1, -1, 0, 1)",
        f"{x}[torch.arange({x}.shape[0]).flip(0)]",
        f"{x}.argmax({dim}).unsqueeze(-1).to({d.dtype})",
        f"torch.bucketize({x}, torch.tensor([-1.0, 0.0, 1.0]).to({x})).to({d.dtype})",
        f"torch.searchsorted(torch.tensor([-1.0, 0.0, 0.7]).to({x}), {x}).to({d.dtype})",
        f"torch.topk({x}, 2, {dim}).values.flip({dim})",
        f"torch.gather({x}, {dim}, torch.topk({x}, 1, {dim}).indices)",
    ]
    return d.choice(*forms)


def looked_up(d: Drawing) -> str | None:
    """A table of learned positions, whole, cut or indexed, added to a sequence."""
    x = d.ranked(3)
    if x is None or (width := d.size(x, -1)) is None:
        return None
    table = d.attribute("p", "{0} = nn.Parameter(torch.randn(" + f"1, 64, {width}) * 0.1)")
    rows = d.attribute("m", f"{{0}} = nn.Embedding(64, {width})")
    token = f"{table}[:, :1].expand({x}.shape[0], -1, -1)"
    return d.choice(
        f"{x} + {table}[:, :{x}.shape[1]]",
        f"{x} + {rows}(torch.arange({x}.shape[1]))",
        f"torch.cat([{token}, {x}], 1)",
        f"torch.cat([{token}, {x}], 1)[:, 0]",
        f"{x} + {rows}.weight[: {x}.shape[1]]",
    )


def bag(d: Drawing) -> str | None:
    ids = d.value(lambda v: v.dim() == 2 and str(v.dtype) == "torch.int64", is_float=False)
    if ids is None:
        return None
    table = d.attribute(
        "m", f"{{0}} = nn.EmbeddingBag(50, {d.width()}, mode='{d.choice('mean', 'sum', 'max')}')"
    )
    return f"{table}({ids}.clamp(0, 49))"


def strided(d: Drawing) -> str | None:
    """Views by strides, turns over several axes, parts along a diagonal."""
    x = d.ranked(2, 3, 4)
    if x is None:
        return None
    rank = d.of(x).dim()
    forms = [
        f"{x}.roll((1, -1), (0, -1))",
        f"{x}.flip((0, -1))",
        f"{x}.diagonal(dim1=-2, dim2=-1)",
        f"torch.diag_embed({x}[..., 0])",
        f"{x}.swapaxes(0, -1)",
        f"{x}.unfold(-1, 2, 2)",
        f"torch.combinations({x}.flatten()[:4])",
        f"torch.kron({x}.flatten()[:3], torch.ones(2).to({x}))",
        f"torch.cartesian_prod({x}.flatten()[:3], {x}.flatten()[:2])",
        f"torch.block_diag({x}.flatten(1)[:2], {x}.flatten(1)[:1])",
        f"{x}.cumsum(-1).diff(dim=-1)",
    ]
    if all(d.size(x, at) is not None for at in range(rank)) and min(d.of(x).shape) > 1:
        sizes = ", ".join(str(size - 1) for size in d.of(x).shape)
        strides = d.of(x).contiguous().stride()
        forms += [f"{x}.contiguous().as_strided(({sizes}), {strides})"] * 3
        forms += [f"{x}.contiguous().as_strided(({sizes}), {strides}, 1)"]
    return d.choice(*forms)


def windows(d: Drawing) -> str | None:
    """Cut a plane or a signal in windows; shift, weigh or transform them; join them again."""
    x = d.ranked(2, 3, 4)
    if x is None:
        return None
    rank = d.of(x).dim()
    if rank == 4:
        size, c = d.choice(2, 4), f"{x}.shape[1]"
        n, h, w = f"{x}.shape[0]", f"{x}.shape[2]", f"{x}.shape[3]"
        shifted = f"{x}.roll((-1, -1), (2, 3))" if d.chance(0.5) else x
        cut = f"{shifted}.view({n}, {c}, {h} // {size}, {size}, {w} // {size}, {size})"
        flat = f"{cut}.permute(0, 2, 4, 3, 5, 1).reshape(-1, {size * size}, {c})"
        back = f"v.view({n}, {h} // {size}, {w} // {size}, {size}, {size}, {c})"
        body = d.choice("v * 1.5", "torch.softmax(v @ v.mT, -1) @ v", "v - v.mean(1, keepdim=True)")
        joined = f".permute(0, 5, 1, 3, 2, 4).reshape({x}.shape)"
        return f"(lambda v: {back}{joined})((lambda v: {body})({flat}))"
    size = d.choice(4, 5)
    if (d.size(x, -1) or 0) < size:
        return None
    window = d.choice("hann_window", "hamming_window", "blackman_window")
    frames = f"{x}.unfold(-1, {size}, 2) * torch.{window}({size}).to({x})"
    base = d.attribute("p", "{0} = nn.Parameter(torch.randn(" + f"{size}, 6))")
    return d.choice(
        frames,
        f"({frames}) @ {base}",
        f"torch.log((({frames}) @ {base}).square() + 1e-3)",
        f"torch.fft.rfft({frames}).abs()",
        f"torch.view_as_real(torch.fft.rfft({frames})).square().sum(-1)",
    )


def sampled(d: Drawing) -> str | None:
    """Resizes of every mode, and samplings at computed places."""
    x = d.ranked(3, 4, 5)
    if x is None:
        return None
    rank = d.of(x).dim()
    if rank == 3:
        mode = d.choice('"nearest"', '"nearest-exact"', '"area"', '"linear", align_corners=True')
        return f"F.interpolate({x}, size={d.choice(3, 6, 9)}, mode={mode})"
    if rank == 5:
        mode = d.choice('"nearest"', '"trilinear", align_corners=True', '"trilinear"', '"area"')
        return f"F.interpolate({x}, scale_factor=2, mode={mode})"
    mode = d.choice("bilinear", "nearest", "bicubic")
    places = d.choice("zeros", "border", "reflection")
    turned = f"torch.tensor([[[0.8, 0.2, 0.1], [-0.1, 0.9, 0.0]]]).to({x})"
    grid = f"F.affine_grid({turned}, (1, 1, 4, 5), align_corners=False)"
    grid = f"{grid}.expand({x}.shape[0], -1, -1, -1)"
    options = f'mode="{mode}", padding_mode="{places}", align_corners={d.chance(0.5)}'
    other = d.ranked(4)
    return d.choice(
        f"F.grid_sample({x}, {grid}, {options})",
        f"F.grid_sample({x}, torch.tanh({x}[:, :2].permute(0, 2, 3, 1)), {options})",
        f'F.interpolate({x}, size={other}.shape[-2:], mode="nearest")',
        f'F.interpolate({x}, size={other}.shape[-2:], mode="bilinear")',
        f'F.interpolate({x}, scale_factor=(2, 3), mode="nearest-exact")',
        f'F.interpolate({x}, scale_factor=0.5, mode="area")',
        f'F.interpolate({x}, scale_factor=0.5, mode="bilinear", antialias=True)',
        f'F.interpolate({x}, scale_factor=1.5, mode="bicubic", align_corners=True)',
        f"(lambda v: F.max_unpool2d(*v, 2))(F.max_pool2d({x}, 2, return_indices=True))",
        f"F.fold(F.unfold({x}, 2, stride=2), {x}.shape[-2:], 2, stride=2)",
    )


def compared(d: Drawing) -> str | None:
    """Distances and likenesses between rows."""
    x = d.ranked(2, 3)
    if x is None:
        return None
    y = d.value(lambda v: v.shape == d.of(x).shape) or x
    return d.choice(
        f"F.cosine_similarity({x}, {y}, dim=-1)",
        f"F.pairwise_distance({x}, {y})",
        f"torch.cdist({x}, {y} + 1.0)",
        f"F.cosine_similarity({x}[..., None, :], {y}.unsqueeze(-3), dim=-1)",
        f"torch.linalg.cross({x}[..., :3], {y}[..., :3])",
        f"torch.cov({x}.flatten(1))",
        f"torch.trapezoid({x}, dim=-1)",
        f"(F.normalize({x}, dim=-1) @ F.normalize({y}, dim=-1).mT).exp()",
    )


def pyramid(d: Drawing) -> str | None:
    """One convolution called at several sizes, its results resized and added or joined."""
    x = d.ranked(4)
    if x is None or (channels := d.size(x, 1)) is None:
        return None
    out = d.choice(channels, d.width())
    conv = d.attribute("m", f"{{0}} = nn.Conv2d({channels}, {out}, 3, padding=1)")
    small = f"F.{d.choice('max', 'avg')}_pool2d({x}, 2)"
    grown = f"F.interpolate({conv}({small}), size={x}.shape[-2:])"
    flat = f"torch.cat([{conv}({x}).flatten(2), {conv}({small}).flatten(2)], 2)"
    return d.choice(
        f"{conv}({x}) + {grown}",
        f"torch.cat([{conv}({x}), {grown}], 1)",
        flat,
        f"{flat}.transpose(1, 2)",
        f"sum(F.adaptive_avg_pool2d({conv}(v), 1) for v in ({x}, {small}))",
        f"torch.stack([{conv}(v).mean((2, 3)) for v in ({x}, {small}, {x} * 0.5)], 1)",
    )


def transposed_of_any_form(d: Drawing) -> str | None:
    """A transposed convolution with groups, dilation and output padding at once."""
    dims = d.choice(1, 2, 2, 3)
    x = d.value(lambda v: v.dim() == dims + 2 and v.numel() > 0)
    if x is None or (channels := d.size(x, 1)) is None:
        return None
    groups = d.choice(channels, *[g for g in range(1, channels + 1) if channels % g == 0])
    stride, dilation = d.choice(1, 2, 3), d.choice(1, 2, 3)
    options = f"{channels}, {groups * d.choice(1, 2, 3)}, {d.choice(2, 3, 4)}, {stride}"
    options += f", padding={d.choice(0, 1, 2)}, groups={groups}, dilation={dilation}"
    options += f", output_padding={d.choice(*range(max(stride, dilation)))}"
    conv = d.attribute("m", f"{{0}} = nn.ConvTranspose{dims}d({options})")
    return f"{conv}({x})"


def recurrent_over_a_plane(d: Drawing) -> str | None:
    """convolution -> rows as steps -> LSTM, GRU -> linear, as readers of text lines do."""
    x = d.ranked(4)
    if x is None or (channels := d.size(x, 1)) is None:
        return None
    inner = d.choice(4, 6)
    conv = d.attribute("m", f"{{0}} = nn.Conv2d({channels}, {inner}, 3, padding=1)")
    kind, hidden = d.choice("LSTM", "GRU"), d.choice(4, 8)
    layer = d.attribute("m", f"{{0}} = nn.{kind}({inner}, {hidden}, batch_first=True)")
    head = d.attribute("m", f"{{0}} = nn.Linear({hidden}, 5)")
    steps = f"F.relu({conv}({x})).mean(2).transpose(1, 2)"
    last = f"{layer}({steps})[1]" + ("[0][0]" if kind == "LSTM" else "[0]")
    return d.choice(f"{head}({layer}({steps})[0])", f"{head}({last})")


def scaled_weight(d: Drawing) -> str | None:
    """A product whose weight is a parameter times another: scales, masks, norms of weights."""
    x = d.value(lambda v: v.dim() in (2, 3, 4) and v.numel() > 0)
    if x is None:
        return None
    if d.of(x).dim() == 4 and (channels := d.size(x, 1)) is not None:
        out = d.width()
        layer = d.attribute("m", f"{{0}} = nn.Conv2d({channels}, {out}, 3)")
        scale = d.attribute("p", "{0} = nn.Parameter(torch.rand(" + f"{out}, 1, 1, 1) + 0.5)")
        weight = d.choice(
            f"{layer}.weight * {scale}",
            f"F.normalize({layer}.weight.flatten(1), dim=1).view_as({layer}.weight) * {scale}",
        )
        return f"F.conv2d({x}, {weight}, {layer}.bias, padding=1)"
    if (width := d.size(x, -1)) is None:
        return None
    made = f"nn.Linear({width}, {d.width()})"
    if d.chance(0.4):
        norm = d.choice("weight_norm", "orthogonal", "spectral_norm")
        return f"{d.attribute('m', f'{{0}} = nn.utils.parametrizations.{norm}({made})')}({x})"
    layer = d.attribute("m", "{0} = " + made)
    scale = d.attribute("p", f"{{0}} = nn.Parameter(torch.rand({width}) + 0.5)")
    mask = f"({layer}.weight > 0)"
    weights = (f"{layer}.weight * {scale}", f"{layer}.weight * {mask}", f"{layer}.weight.tril()")
    shift = f"{layer}({x} * {scale})"
    return d.choice(shift, *(f"F.linear({x}, {w}, {layer}.bias)" for w in weights))


def experts(d: Drawing) -> str | None:
    """Every expert's result, weighed by a gate; or the best one's weights, gathered."""
    x = d.ranked(2, 3)
    if x is None or (width := d.size(x, -1)) is None:
        return None
    count, n = d.choice(2, 3), d.width()
    gate = d.attribute("m", f"{{0}} = nn.Linear({width}, {count})")
    table = d.attribute("p", "{0} = nn.Parameter(torch.randn(" + f"{count}, {width}, {n}) * 0.3)")
    chosen = f"{table}[{gate}({x}).argmax(-1)]"
    return d.choice(
        f"torch.einsum('...k,kio,...i->...o', torch.softmax({gate}({x}), -1), {table}, {x})",
        f"({x}.unsqueeze(-2) @ {chosen}).squeeze(-2)",
        f"sum({gate}({x})[..., k, None].sigmoid() * ({x} @ {table}[k]) for k in range({count}))",
    )


def encoder_layer(d: Drawing) -> str | None:
    x = d.ranked(3)
    if x is None or (width := d.size(x, -1)) is None:
        return None
    heads = d.choice(*[h for h in (1, 2, 4) if width % h == 0])
    options = f"{width}, {heads}, {d.choice(8, 12)}, batch_first=True"
    options += f', activation="{d.choice("relu", "gelu")}", norm_first={d.chance(0.5)}'
    if d.chance(0.3):
        return f"{d.attribute('m', f'{{0}} = nn.TransformerDecoderLayer({options})')}({x}, {x})"
    return f"{d.attribute('m', f'{{0}} = nn.TransformerEncoderLayer({options})')}({x})"


POSITIONS = {
    einsum: 3,
    placed: 3,
    looked_up: 2,
    bag: 2,
    strided: 2,
    windows: 2,
    sampled: 3,
    compared: 1,
}
SEVERAL_SIZES = {
    pyramid: 2,
    transposed_of_any_form: 2,
    recurrent_over_a_plane: 0.4,
    scaled_weight: 1,
    experts: 1,
    encoder_layer: 0.5,
}
