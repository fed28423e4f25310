"""Float functions in the operators that the delegate has.

ExecuTorch's own kernels compute them one element at a time: `benchmarks/delegated_functions.py` has
the times of both.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.nn import functional

from pt2e_quant.accelerate.recompile import recompile
from pt2e_quant.backends.target.float_retries import is_left_plain
from pt2e_quant.backends.xnnpack.passes.delegated_norms import (
    NORMS,
    is_faster_written,
    norm_of_channels,
)
from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.ops import ADAPTIVE_AVG_POOL2D, arguments, aten
from pt2e_quant.graph.pattern import Match, Op, Var
from pt2e_quant.graph.pipeline import HAS_VALUES, Note, PassResult, graph_pass
from pt2e_quant.graph.rewrite import Rule, Skip, rewrite
from pt2e_quant.passes.functions import elementwise
from pt2e_quant.passes.functions.resizes import bicubic_between_pixels
from pt2e_quant.passes.functions.write_functions import write_out

_MOST_WEIGHTS = 2**20
"""Elements of a matrix that resizes or pools an axis: beyond, the file would grow by megabytes."""
_ARTANH = (1.0, 0.3333316082, 0.2001229761, 0.1398257888, 0.1407888916)
"""Of artanh(z) / z by powers of z², to 4e-9 where |z| <= 1/3: interpolated at Chebyshev points."""
_POWERS: Mapping[float, Callable[[Tensor], Tensor]] = {
    -0.5: torch.rsqrt,
    0.5: torch.sqrt,
    3.0: lambda x: x * x * x,
    4.0: lambda x: (x * x).square(),
}


def _softplus(x: Tensor, beta: float = 1.0, threshold: float = 20.0) -> Tensor:
    """Without the branch of large values, which it differs from by at most exp(-threshold).

    log(1 + e) = 2 artanh(e / (2 + e)) keeps the bits of a small e, which 1 + e loses.
    """
    e = torch.exp(-(x * beta).abs())
    z = e / (e + 2.0)
    square = z * z
    series = square * _ARTANH[-1]
    for coefficient in _ARTANH[-2:0:-1]:
        series = (series + coefficient) * square
    return functional.relu(x) + z * (series + _ARTANH[0]) * (2.0 / beta)


def _mish(x: Tensor) -> Tensor:
    return x * torch.tanh(_softplus(x))


def _log_sigmoid(x: Tensor) -> Tensor:
    return -_softplus(-x)


def _celu(x: Tensor, alpha: float = 1.0) -> Tensor:
    return functional.elu(x / alpha) * alpha


def _selu(x: Tensor) -> Tensor:
    return functional.elu(x, elementwise.SELU_ALPHA) * elementwise.SELU_SCALE


def _power(x: Tensor, exponent: float) -> Tensor:
    return _POWERS[exponent](x)


def _norm(
    x: Tensor, ord: float = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Tensor:
    return (x * x).sum(dim, keepdim).sqrt()


def _in_last(function: Callable[[Tensor], Tensor], x: Tensor, dim: int) -> Tensor:
    """A function over the last axis, of another one between two transposes."""
    if dim % x.dim() == x.dim() - 1:
        return function(x)
    return function(x.transpose(dim, -1)).transpose(dim, -1).contiguous()


def _softmax(x: Tensor, dim: int, dtype: Any = None) -> Tensor:
    return _in_last(lambda rows: rows.softmax(-1), x, dim)


def _log_softmax(x: Tensor, dim: int, dtype: Any = None) -> Tensor:
    """Subtract the log of the sum, which is the mean of x - log(share) weighted by the shares.

    These are all equal; shares of 0, and minus infinity, have no weight.
    """

    def of_rows(rows: Tensor) -> Tensor:
        shares = rows.softmax(-1)
        logs = rows.clamp(min=-1e30) - shares.clamp(min=1e-30).log()
        return rows - (shares * logs).mean(-1, keepdim=True) * rows.shape[-1]

    return _in_last(of_rows, x, dim)


def _roll(x: Tensor, shifts: Sequence[int], dims: Sequence[int] = ()) -> Tensor:
    for shift, dim in zip(shifts, dims, strict=True):
        size = x.shape[dim]
        cut = -shift % size
        if cut:
            x = torch.cat([x.narrow(dim, cut, size - cut), x.narrow(dim, 0, cut)], dim)
    return x


def _by_axes(m: Match, editor: Editor, resize: Callable[[Tensor, int], Tensor]) -> Node | Skip:
    """Images whose rows and columns are multiplied by a matrix each.

    Args:
        m: a resize or pool of images, by the same weights in all rows and in all columns.
        editor: of the graph.
        resize: what it does to float32[1, size, size, 1] along an axis.
    """
    node, x = m.anchor, m["x"]
    value, made = x.meta["val"], node.meta["val"]
    sizes = (*value.shape[2:], *made.shape[2:])
    if value.dim() != 4 or value.dtype is not torch.float32:
        return Skip("it is no batch of images in float32")
    if any(not isinstance(size, int) for size in sizes):
        return Skip("its weights depend on run-time sizes")
    if max(sizes[0] * sizes[2], sizes[1] * sizes[3]) > _MOST_WEIGHTS:
        return Skip("its matrices are large")
    for axis in (1, 0):  # rows first: columns become rows for the second product
        size, end = sizes[axis], sizes[2 + axis]
        weights = resize(torch.eye(size).view(1, size, size, 1), axis).view(size, end).mT
        held = editor.constant(f"{node.name}.axis{axis}", weights.contiguous(), like=node)
        x = x if axis else editor.call(aten.transpose.int, x, 2, 3, like=node)
        x = editor.call(aten.linear.default, x, held, like=node)
    x = editor.call(aten.transpose.int, x, 2, 3, like=node)
    contiguous = torch.contiguous_format
    return editor.call(aten.clone.default, x, memory_format=contiguous, like=node)


def _bicubic(m: Match, editor: Editor) -> Node | Skip:
    given, ends = arguments(m.anchor), m.anchor.meta["val"].shape[2:]
    factors = given["scale_factors"] or (None, None)

    def resize(impulses: Tensor, axis: int) -> Tensor:
        size = [ends[axis], 1]
        made: Tensor = aten.upsample_bicubic2d.default(
            impulses, size, given["align_corners"], factors[axis], None
        )
        return made

    return _by_axes(m, editor, resize)


def _adaptive(m: Match, editor: Editor) -> Node | Skip:
    ends = m.anchor.meta["val"].shape[-2:]
    if all(end == 1 for end in ends):
        return Skip("the delegate has a mean")
    return _by_axes(
        m, editor, lambda impulses, axis: functional.adaptive_avg_pool2d(impulses, (ends[axis], 1))
    )


def _reciprocal(m: Match, editor: Editor) -> Node | Skip:
    if m["x"].meta["val"].dtype is not torch.float32:
        return Skip("it is not of float32")
    one = editor.constant(f"{m.anchor.name}.one", torch.ones(1), like=m.anchor)
    return editor.call(aten.div.Tensor, one, m["x"], like=m.anchor)


_RULES = tuple(
    Rule(name, Op(overloads, Var("x"), where=lambda node: not is_left_plain(node)), build)
    for name, overloads, build in (
        ("bicubic", (aten.upsample_bicubic2d.vec,), _bicubic),
        ("adaptive_avg_pool2d", ADAPTIVE_AVG_POOL2D, _adaptive),
        ("norm of channels", (aten.layer_norm.default,), norm_of_channels),
        ("reciprocal", (aten.reciprocal.default,), _reciprocal),
    )
)
_FORMS: Mapping[str, Callable[..., Tensor]] = {
    **NORMS,
    "aten.celu.default": _celu,
    "aten.linalg_vector_norm.default": _norm,
    "aten.log_sigmoid.default": _log_sigmoid,
    "aten.log_softmax.int": _log_softmax,
    "aten.mish.default": _mish,
    "aten.pow.Tensor_Scalar": _power,
    "aten.roll.default": _roll,
    "aten.selu.default": _selu,
    "aten.softmax.int": _softmax,
    "aten.softplus.default": _softplus,
    "aten.upsample_bicubic2d.vec": bicubic_between_pixels,
}


@graph_pass(needs=(HAS_VALUES,), gives=())
def functions_in_delegate(gm: GraphModule) -> PassResult:
    """Write float functions with operators of the delegate; they differ by float32's rounding.

    Before:  mish(x)
    After:   mul(x, tanh(add(relu(x), mul(…))))
    """
    found = rewrite(gm, _RULES)
    calls = [n for n in gm.graph.nodes if str(n.target) in _FORMS and _is_float32(n) and _fits(n)]
    written = [n for n in calls if write_out(gm, n, _FORMS[str(n.target)], is_canonical=True)]
    if written:
        gm.graph.eliminate_dead_code()
        recompile(gm)
    notes = (Note(n.name, f"{n.target} is written for the delegate") for n in written)
    return PassResult(found.changed or bool(written), (*found.notes, *notes))


def _fits(node: Node) -> bool:
    """True if the form holds for the arguments, and the delegate does not take the call as it is.

    Asked before a form is traced: a transformer has a softmax and a power in each layer.
    """
    if is_left_plain(node):
        return False
    if str(node.target) in NORMS:
        return is_faster_written(node)
    given, value = arguments(node), node.all_input_nodes[0].meta["val"]
    match str(node.target):
        case "aten.softplus.default":
            return bool(given["threshold"] >= 20)  # else its branch makes a difference
        case "aten.pow.Tensor_Scalar":
            return given["exponent"] in _POWERS
        case "aten.linalg_vector_norm.default":
            return given["ord"] == 2 and given["dim"] is not None and given["dtype"] is None
        case "aten.softmax.int":
            return bool(given["dim"] % value.dim() != value.dim() - 1 and given["dtype"] is None)
        case "aten.log_softmax.int":
            return isinstance(value.shape[given["dim"]], int) and given["dtype"] is None
        case "aten.roll.default":
            sizes = [value.shape[dim] for dim in given["dims"]]
            return bool(sizes) and all(isinstance(size, int) and size > 0 for size in sizes)
    return True


def _is_float32(node: Node) -> bool:
    values = [n.meta.get("val") for n in (node, *node.all_input_nodes)]
    return all(isinstance(v, Tensor) and v.dtype is torch.float32 for v in values)
