"""Statements that move data: views, pools, pads, gathers, joins, resizes."""

from tests.fuzz.drawing import Drawing

__all__ = ["MOVERS"]


def permute(d: Drawing) -> str | None:
    x = d.ranked(2, 3, 4, 5)
    if x is None:
        return None
    order = list(range(d.of(x).dim()))
    d.rng.shuffle(order)
    a, b = order[0], order[1]
    forms = [f"{x}.permute({', '.join(map(str, order))})", f"{x}.transpose({a}, {b})", f"{x}.mT"]
    return d.choice(
        *forms, f"{x}.transpose({a}, {b}).contiguous()", f"torch.movedim({x}, {a}, {b})"
    )


def reshape(d: Drawing) -> str | None:
    x = d.value(lambda v: v.dim() > 0)
    if x is None:
        return None
    rank, last = d.of(x).dim(), d.of(x).shape[-1]
    half = d.choice(*[n for n in range(1, last + 1) if last % n == 0] or [1])
    forms = [
        f"{x}.reshape({x}.shape[0], -1)",
        f"{x}.flatten()",
        f"{x}.unsqueeze({d.integer(0, rank)})",
    ]
    forms += [f"{x}.reshape(-1, {x}.shape[-1])", f"{x}.view({x}.shape[0], -1)", f"{x}.squeeze()"]
    forms += [f"{x}.unflatten(-1, ({half}, {last // half}))", f"{x}[None]", f"{x}[..., None]"]
    forms += [f"{x}.flatten({rank - 2})", f"{x}.squeeze({d.integer(0, rank - 1)})"] * (rank > 1)
    if rank == 4 and (channels := d.size(x, 1)) is not None:
        groups = d.choice(*[g for g in range(1, channels + 1) if channels % g == 0])
        tail = f"{x}.shape[2], {x}.shape[3]"
        forms += [
            f"{x}.view({x}.shape[0], {groups}, {channels // groups}, {tail}).transpose(1, 2)"
            f".reshape({x}.shape[0], {channels}, {tail})",
            f"F.channel_shuffle({x}, {groups})",
            f"{x}.flatten(2).transpose(1, 2)",
        ]
    return d.choice(*forms)


def heads(d: Drawing) -> str | None:
    x = d.ranked(3)
    if x is None or (width := d.size(x, -1)) is None:
        return None
    count = d.choice(*[h for h in (1, 2, 3, 4) if width % h == 0])
    return f"{x}.view({x}.shape[0], {x}.shape[1], {count}, {width // count}).transpose(1, 2)"


def cut(d: Drawing) -> str | None:
    x = d.value(lambda v: v.dim() > 0 and v.numel() > 0)
    if x is None:
        return None
    rank = d.of(x).dim()
    dim = d.integer(0, rank - 1)
    size = d.size(x, dim) or 1
    at = ":, " * dim
    forms = [f"{x}[{at}{d.integer(0, size)}:]", f"{x}[{at}::2]", f"{x}[{at}:-1]", f"{x}[..., -1]"]
    forms += [f"{x}.select({dim}, {d.integer(0, size - 1)})", f"{x}.narrow({dim}, 0, {size})"]
    forms += [f"{x}.chunk(2, {dim})[{d.choice(0, -1)}]", f"{x}[..., :1]", f"{x}[0]", f"{x}[:, :0]"]
    forms += [f"torch.split({x}, {d.integer(1, size)}, {dim})[-1]", f"{x}.unbind({dim})[0]"]
    forms += [f"torch.tensor_split({x}, 2, dim={dim})[0]", f"{x}[..., [0, -1]]"]
    return d.choice(*forms)


def join(d: Drawing) -> str | None:
    x = d.value(lambda v: v.dim() > 0)
    if x is None:
        return None
    shape = d.of(x).shape
    dim = d.integer(0, len(shape) - 1)
    y = d.value(
        lambda v: (
            v.dim() == len(shape)
            and all(a == b for i, (a, b) in enumerate(zip(v.shape, shape, strict=True)) if i != dim)
        )
    )
    same = d.value(lambda v: v.shape == shape)
    forms = (f"torch.cat([{x}, {y}], {dim})", f"torch.cat([{y}, {x}, {x}], {dim})")
    forms += (
        f"torch.stack([{x}, {same}], {d.integer(0, len(shape))})",
        f"torch.hstack([{x}, {same}])",
    )
    return d.choice(*forms, *forms[:2], f"torch.cat([{x}, torch.zeros_like({x})], {dim})")


def repeat(d: Drawing) -> str | None:
    x = d.value(lambda v: 0 < v.dim() < 5)
    if x is None:
        return None
    rank = d.of(x).dim()
    dim = d.integer(0, rank - 1)
    times = ", ".join(str(d.choice(1, 1, 2)) for _ in range(rank))
    forms = [f"{x}.flip({dim})", f"{x}.roll({d.choice(1, 2, -1)}, {dim})", f"{x}.repeat({times})"]
    forms += [f"{x}.repeat_interleave(2, {dim})", f"{x}.tile(2)", f"{x}.expand(2, {'-1, ' * rank})"]
    forms += [f"{x}.unsqueeze(1).expand(-1, 3, {'-1, ' * (rank - 1)})", f"{x}.clone()"]
    forms += [f"{x}.tril()", f"{x}.triu(1)", f"torch.rot90({x}, 1, (-2, -1))"] * (rank > 1)
    return d.choice(*forms)


def pad(d: Drawing) -> str | None:
    x = d.ranked(2, 3, 4, 5)
    if x is None:
        return None
    rank = d.of(x).dim()
    widths = [d.choice(0, 1, 1, 2, -1) for _ in range(2 * d.integer(1, min(rank, 3)))]
    mode = d.choice(
        "", "", "", f", value={d.choice(1.0, -2.5)}", ', mode="reflect"', ', mode="replicate"'
    )
    if "mode" in mode:
        widths = [abs(w) for w in widths[: 2 * max(rank - 2, 1)]] + [0] * (
            2 * max(rank - 2, 1) - len(widths)
        )
    return f"F.pad({x}, ({', '.join(map(str, widths))}){mode})"


def pool(d: Drawing) -> str | None:
    dims = d.choice(1, 2, 2, 2, 3)
    x = d.value(lambda v: v.dim() == dims + 2 and v.numel() > 0)
    if x is None:
        return None
    kernel = d.choice(2, 2, 3, (3, 2)) if dims == 2 else d.choice(2, 3)
    options = f"{kernel}"
    options += f", stride={d.choice(1, 2, 3)}" if d.chance(0.5) else ""
    options += ", padding=1" if d.chance(0.3) else ""
    options += ", ceil_mode=True" if d.chance(0.2) else ""
    largest = options + (", dilation=2" if d.chance(0.1) else "")
    average = options + (", count_include_pad=False" if d.chance(0.3) else "")
    out = d.choice(1, 1, 2, 3, '"half"')
    out = f"max({x}.shape[-1] // 2, 1)" if out == '"half"' else out
    return d.choice(
        f"F.max_pool{dims}d({x}, {largest})",
        f"F.avg_pool{dims}d({x}, {average})",
        f"F.adaptive_avg_pool{dims}d({x}, {out})",
        f"F.adaptive_max_pool{dims}d({x}, {out})",
        f"F.lp_pool{dims}d({x}, 2, {kernel if isinstance(kernel, int) else 2})",
    )


def resize(d: Drawing) -> str | None:
    x = d.ranked(3, 4)
    if x is None:
        return None
    if d.of(x).dim() == 3:
        return d.choice(
            f"F.interpolate({x}, scale_factor=2)",
            f'F.interpolate({x}, size=7, mode="linear")',
        )
    return d.choice(
        f"F.interpolate({x}, scale_factor=2)",
        f"F.interpolate({x}, scale_factor=2.0, mode='nearest')",
        f'F.interpolate({x}, scale_factor=2, mode="bilinear", align_corners={d.chance(0.5)})',
        f'F.interpolate({x}, size=(5, 7), mode="{d.choice("nearest", "bilinear", "bicubic")}")',
        f"F.pixel_shuffle({x}, 2)",
        f"F.pixel_unshuffle({x}, 2)",
        f"F.unfold({x}, {d.choice(2, 3)}, padding=1)",
        f"F.fold(F.unfold({x}, 2), {x}.shape[-2:], 2)",
        f"F.grid_sample({x}, torch.tanh({x}[:, :2].permute(0, 2, 3, 1)), align_corners=False)",
    )


def gather(d: Drawing) -> str | None:
    x = d.ranked(1, 2, 3, 4)
    if x is None:
        return None
    dim = d.integer(0, d.of(x).dim() - 1)
    ids = d.value(lambda v: v.dim() == 1 and str(v.dtype) == "torch.int64", is_float=False)
    forms = [f"torch.index_select({x}, {dim}, torch.tensor([0, 0]))", f"{x}[torch.tensor([0, -1])]"]
    forms += [f"torch.gather({x}, {dim}, {x}.argsort({dim}))", f"torch.sort({x}, {dim}).values"]
    forms += [
        f"torch.topk({x}, 1, {dim}).values",
        f"torch.take_along_dim({x}, {x}.argmax({dim}, keepdim=True), {dim})",
    ]
    forms += [f"torch.zeros_like({x}).index_add({dim}, torch.tensor([0]), {x}.narrow({dim}, 0, 1))"]
    forms += [f"torch.zeros_like({x}).scatter({dim}, {x}.argmax({dim}, keepdim=True), 1.0)"]
    forms += [
        f"{x}.index_fill({dim}, torch.arange(min(1, {x}.shape[{dim}])), 0.5)",
        f"{x}.unfold({dim}, 2, 1)",
    ]
    if ids:
        forms.append(f"torch.index_select({x}, {dim}, {ids}.clamp(0, 0))")
    return d.choice(*forms)


def made(d: Drawing) -> str | None:
    """A tensor made of the sizes of another."""
    x = d.ranked(2, 3, 4)
    if x is None:
        return None
    like = f".to({x})"
    return d.choice(
        f"torch.zeros({x}.shape[0], {d.width()}){like}",
        f"torch.ones_like({x})",
        f"{x}.new_full(({x}.shape[0], 3), 0.25)",
        f"torch.arange({x}.shape[-1]){like}",
        f"torch.linspace(-1, 1, {x}.shape[-1]){like}",
        f"torch.full_like({x}, 0.5)",
        f"torch.eye({x}.shape[-1]){like}",
        f"torch.arange({x}.shape[1])",
    )


MOVERS = {
    permute: 3,
    reshape: 4,
    heads: 1,
    cut: 4,
    join: 3,
    repeat: 1.5,
    pad: 1.5,
    pool: 3,
    resize: 1.5,
    gather: 1,
    made: 0.7,
}
