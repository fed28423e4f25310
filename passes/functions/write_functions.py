"""Write functions that a runtime lacks with operators that it has."""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg

from pt2e_quant.accelerate.recompile import recompile
from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.meta import constant_of, without_guards
from pt2e_quant.graph.ops import aten, is_call, is_getitem
from pt2e_quant.graph.pipeline import HAS_VALUES, GraphPass, Note, PassResult
from pt2e_quant.graph.subgraphs import named_graphs
from pt2e_quant.passes.functions import (
    elementwise,
    layers,
    matrices,
    places,
    rotations,
    rows,
    sizes_of_run_time,
)


def _overloads(names: Iterable[str]) -> Iterator[OpOverload]:
    packets = (getattr(torch.ops.aten, name) for name in names)
    return (getattr(packet, form) for packet in packets for form in packet.overloads())


_MATRICES: Mapping[str, Callable[..., rows.Results]] = {
    "aten._linalg_det.default": matrices.determinant,
    "aten._linalg_eigh.default": rotations.eigh,
    "aten._linalg_slogdet.default": matrices.sign_and_log,
    "aten._linalg_solve_ex.default": matrices.solve_ex,
    "aten._linalg_svd.default": rotations.svd,
    "aten.cholesky.default": matrices.cholesky,
    "aten.cholesky_inverse.default": matrices.cholesky_inverse,
    "aten.cholesky_solve.default": matrices.cholesky_solve,
    "aten.linalg_cholesky_ex.default": matrices.cholesky_ex,
    "aten.linalg_inv_ex.default": matrices.inverse_ex,
    "aten.linalg_lu.default": matrices.lu,
    "aten.linalg_lu_factor_ex.default": matrices.lu_factor,
    "aten.linalg_lu_solve.default": matrices.lu_solve,
    "aten.linalg_matrix_exp.default": matrices.exponential,
    "aten.linalg_pinv.atol_rtol_float": rotations.pinv,
    "aten.linalg_pinv.atol_rtol_tensor": rotations.pinv,
    "aten.linalg_qr.default": matrices.qr,
    "aten.linalg_solve_triangular.default": matrices.solve_triangular,
    "aten.lu_unpack.default": matrices.lu_unpack,
    "aten.triangular_solve.default": matrices.triangular_solve,
}
"""Functions of matrices, which torch's decompositions keep."""
_COMPOSED = (
    *("_lu_with_info", "linalg_cholesky", "linalg_cond", "linalg_det", "linalg_eigh"),
    *("linalg_eigvalsh", "linalg_inv", "linalg_lu_factor", "linalg_matrix_norm"),
    *("linalg_matrix_power", "linalg_matrix_rank", "linalg_norm"),
    *("linalg_slogdet", "linalg_solve", "linalg_solve_ex", "linalg_svd", "linalg_svdvals"),
    *("linalg_tensorinv", "linalg_tensorsolve", "logdet", "lu_solve", "matrix_exp", "pinverse"),
    *("qr", "svd"),
)
"""Functions that torch composes of others."""
EARLY: Mapping[str, Callable[..., rows.Results]] = {
    **_MATRICES,
    **{str(form): form for form in _overloads(_COMPOSED)},
    "aten.batch_norm.default": layers.batch_norm,
    "aten.instance_norm.default": layers.instance_norm,
}
"""Functions with effects, by operator with its overload: checks of matrices, statistics written.
Programs other than the canonical graph hold no effects."""
FUNCTIONS: Mapping[str, Callable[..., rows.Results]] = {
    **EARLY,
    "aten.__lshift__.Scalar": elementwise.shift_left,
    "aten.__rshift__.Scalar": elementwise.shift_right,
    "aten._is_all_true.default": torch.all,
    "aten._is_any_true.default": torch.any,
    "aten._pdist_forward.default": rows.pdist,
    "aten._trilinear.default": rows.trilinear,
    "aten.addbmm.default": matrices.addbmm,
    "aten.addmv.default": matrices.addmv,
    "aten.addcmul.default": elementwise.add_product,
    "aten.aminmax.default": rows.aminmax,
    "aten.as_strided_scatter.default": places.as_strided_scatter,
    "aten.adaptive_avg_pool1d.default": sizes_of_run_time.adaptive_avg_pool,
    "aten.adaptive_avg_pool2d.default": sizes_of_run_time.adaptive_avg_pool,
    "aten.adaptive_avg_pool3d.default": sizes_of_run_time.adaptive_avg_pool,
    "aten._upsample_bicubic2d_aa.default": layers.antialiased(layers.cubic, by_axis=True),
    "aten._upsample_bicubic2d_aa.vec": layers.antialiased(layers.cubic),
    "aten._upsample_bilinear2d_aa.default": layers.antialiased(layers.triangle, by_axis=True),
    "aten._upsample_bilinear2d_aa.vec": layers.antialiased(layers.triangle),
    "aten._upsample_lanczos2d_aa.default": layers.antialiased(layers.lanczos, by_axis=True),
    "aten._upsample_lanczos2d_aa.vec": layers.antialiased(layers.lanczos),
    "aten.adaptive_max_pool1d.default": rows.adaptive_max_pool,
    "aten.adaptive_max_pool2d.default": rows.adaptive_max_pool,
    "aten.adaptive_max_pool3d.default": rows.adaptive_max_pool,
    "aten.cdist.default": rows.cdist,
    "aten.celu.default": elementwise.celu,
    "aten.pdist.default": rows.pdist,
    **{
        f"aten.{name}.{overload}": elementwise.truth_of_bytes(getattr(torch, name))
        for name in ("all", "any")
        for overload in ("default", "dim", "dims")
    },
    "aten.angle.default": elementwise.angle,
    "aten.argsort.stable": lambda x, *, stable, dim=-1, descending=False: rows.sort(
        x, dim, descending
    )[1],
    "aten.atan2.default": elementwise.atan2,
    "aten.binary_cross_entropy_with_logits.default": elementwise.binary_cross_entropy_with_logits,
    "aten.bucketize.Tensor": rows.bucketize,
    "aten.conv1d.default": sizes_of_run_time.conv_of_groups,
    "aten.conv2d.default": sizes_of_run_time.conv_of_groups,
    "aten.conv_transpose1d.default": rows.conv_transpose,
    "aten.conv_transpose2d.input": rows.conv_transpose,
    "aten.conv_transpose3d.input": rows.conv_transpose,
    "aten.clamp.default": elementwise.clamp,
    "aten.copysign.Tensor": elementwise.copysign,
    "aten.cross_entropy_loss.default": rows.cross_entropy,
    "aten.cummax.default": rows.cummax,
    "aten.cummin.default": rows.cummin,
    "aten.cumprod.default": rows.cumprod,
    "aten.diagonal_scatter.default": places.diagonal_scatter,
    "aten.digamma.default": elementwise.digamma,
    "aten.dist.default": elementwise.dist,
    "aten.elu.default": elementwise.elu,
    "aten.embedding_bag.padding_idx": sizes_of_run_time.embedding_bag,
    "aten._embedding_bag.default": sizes_of_run_time.embedding_bag,
    "aten._embedding_bag_forward_only.default": sizes_of_run_time.embedding_bag,
    "aten.empty_permuted.default": elementwise.empty_permuted,
    "aten.erfc.default": elementwise.erfc,
    "aten.erfinv.default": elementwise.erfinv,
    "aten.exp2.default": lambda x: torch.exp(x * math.log(2.0)),
    "aten.expm1.default": elementwise.expm1,
    "aten.floor_divide.Scalar": elementwise.floor_quotient,
    "aten.floor_divide.default": elementwise.floor_quotient,
    "aten.fmax.default": elementwise.fmax,
    "aten.fmin.default": elementwise.fmin,
    "aten.grid_sampler_3d.default": layers.sample_volumes,
    "aten.histc.default": rows.histc,
    "aten.hypot.default": elementwise.hypot,
    "aten.i0.default": lambda x: elementwise.scaled_bessel(x, 0) * torch.exp(x.abs()),
    "aten.index_put.default": places.index_put,
    "aten.index_reduce.default": places.index_reduce,
    "aten.kthvalue.default": rows.kthvalue,
    "aten.layer_norm.default": layers.layer_norm,
    "aten.ldexp.Tensor": lambda x, y: x * torch.pow(2.0, y),
    "aten.lgamma.default": elementwise.lgamma,
    "aten.log_sigmoid.default": elementwise.log_sigmoid,
    "aten.logaddexp.default": elementwise.logaddexp,
    "aten.logaddexp2.default": elementwise.logaddexp2,
    "aten.logcumsumexp.default": rows.logcumsumexp,
    "aten.masked_select.default": elementwise.masked_select,
    "aten.median.default": rows.median_of_all,
    "aten.median.dim": rows.median,
    "aten.mode.default": rows.mode,
    "aten.mvlgamma.default": elementwise.mvlgamma,
    "aten.narrow_copy.default": lambda x, *where: torch.narrow(x, *where).clone(),
    "aten.pad.default": rows.pad,
    "aten.pow.Tensor_Scalar": elementwise.power,
    "aten.put.default": places.put,
    "aten.remainder.Scalar": elementwise.remainder,
    "aten.remainder.Scalar_Tensor": elementwise.remainder,
    "aten.remainder.Tensor": elementwise.remainder,
    "aten.round.decimals": elementwise.round_decimals,
    "aten.rrelu.default": elementwise.rrelu,
    "aten.scatter.reduce": places.scatter_with,
    "aten.scatter.value_reduce": places.scatter_with,
    "aten.scatter_reduce.two": sizes_of_run_time.scatter_reduce,
    "aten.searchsorted.Tensor": rows.searchsorted,
    "aten.selu.default": elementwise.selu,
    "aten.signbit.default": elementwise.signbit,
    "aten.soft_margin_loss.default": elementwise.soft_margin_loss,
    "aten.sort.default": rows.sort,
    "aten.sort.stable": lambda x, *, stable, dim=-1, descending=False: rows.sort(
        x, dim, descending
    ),
    "aten.special_digamma.default": elementwise.digamma,
    "aten.special_erfinv.default": elementwise.erfinv,
    "aten.special_gammaln.default": elementwise.lgamma,
    "aten.special_psi.default": elementwise.digamma,
    "aten.special_erfcx.default": elementwise.erfcx,
    "aten.special_log_ndtr.default": elementwise.log_ndtr,
    "aten.special_i0e.default": lambda x: elementwise.scaled_bessel(x, 0),
    "aten.special_i1.default": lambda x: elementwise.scaled_bessel(x, 1) * torch.exp(x.abs()),
    "aten.special_i1e.default": lambda x: elementwise.scaled_bessel(x, 1),
    "aten.special_modified_bessel_i0.default": lambda x: (
        elementwise.scaled_bessel(x, 0) * torch.exp(x.abs())
    ),
    "aten.special_modified_bessel_i1.default": lambda x: (
        elementwise.scaled_bessel(x, 1) * torch.exp(x.abs())
    ),
    "aten.special_ndtri.default": elementwise.ndtri,
    "transformers.grouped_mm_fallback.default": sizes_of_run_time.grouped_product,
}
"""Every function, by operator with its overload."""


_FILLED = (aten.full.default,)
"""What `torch.full`, `torch.ones` and `torch.zeros` are traced to."""
_LEAVES = {
    form: _MATRICES[str(form)]
    for form in _overloads(name.split(".")[1] for name in _MATRICES)
    if str(form) in _MATRICES
}
"""Operators that `torch.export`'s decompositions keep."""


def write_functions(
    has: Collection[str],
    is_inexact: Callable[[Node], bool] = lambda node: False,
    *,
    takes_sizes: bool = True,
) -> GraphPass:
    """A pass over a canonical graph and its bodies.

    Before:  hypot(x, y)
    After:   mul(maximum(abs(x), abs(y)), sqrt(…))

    Args:
        has: the functions that the runtime has itself.
        is_inexact: calls that are written although the runtime has the function.
        takes_sizes: whether operators take a dynamic size for a number; other calls that are given
            one get it as a tensor.
    """
    wanted = FUNCTIONS.keys() - set(has)

    def function_of(node: Node) -> Callable[..., rows.Results] | None:
        name, places = (
            str(node.target),
            () if takes_sizes else sizes_of_run_time.sizes_for_numbers(node),
        )
        if name in wanted or (name in FUNCTIONS and (places or is_inexact(node))):
            return FUNCTIONS[name]
        return sizes_of_run_time.with_tensors(node, places) if places else None

    def edit(gm: GraphModule) -> PassResult:
        notes: list[Note] = []
        for body in named_graphs(gm):
            calls = [(n, found) for n in body.gm.graph.nodes if (found := function_of(n))]
            written = [n for n, function in calls if write_out(body.gm, n, function)]
            notes += [Note(node.name, f"{node.target} is written out") for node in written]
            if written:
                body.gm.graph.eliminate_dead_code()
                recompile(body.gm)
        return PassResult(bool(notes), tuple(notes))

    return GraphPass("write_functions", edit, needs=(HAS_VALUES,), gives=())


def write_out(
    gm: GraphModule,
    node: Node,
    function: Callable[..., rows.Results],
    operator: Callable[[Any], Any] = lambda target: target,
    *,
    is_canonical: bool = False,
) -> bool:
    """Put what a function traces to in a node's place.

    Args:
        gm: the node's graph module. Its dead code is to be eliminated and it is to be recompiled,
            once for all calls.
        node: a call.
        function: what it is called as instead.
        operator: what to call in place of an ATen overload.
        is_canonical: trace to the operators of exported programs, and fold those of constants;
            to what these are decomposed into otherwise.

    Returns:
        False where the function cannot be written, for example of a dynamic size.
    """
    inputs = list(dict.fromkeys(node.all_input_nodes))

    def call(*values: Tensor) -> rows.Results:
        held = dict(zip(inputs, values, strict=True))
        args: Any = map_arg(node.args, lambda n: held[n])
        kwargs: Any = map_arg(node.kwargs, lambda n: held[n])
        return function(*args, **kwargs)

    results = trace_before(
        gm,
        node,
        call,
        inputs,
        operator,
        is_canonical=is_canonical,
        fits=lambda results: _gives_all(node, results),
    )
    if results is None:
        return False
    _replace(node, results)
    return True


@cache
def _decompositions() -> dict[Any, Any]:
    """Of torch's own operators, which is all that functions call: torch takes 0.1 s to make it."""
    return {**torch.export.default_decompositions(), **_LEAVES}


def trace_before(
    gm: GraphModule,
    node: Node,
    call: Callable[..., Any],
    inputs: Sequence[Node],
    operator: Callable[[Any], Any] = lambda target: target,
    *,
    is_canonical: bool,
    fits: Callable[[Any], bool] = lambda results: True,
) -> Any:
    """Insert in front of a node what a function traces to; its inputs and results are flat.

    Args:
        gm: the node's graph module, to be recompiled.
        node: what is inserted takes its place in the source.
        call: the function.
        inputs: what it is called with.
        operator: what to call in place of an ATen overload.
        is_canonical: trace to the operators of exported programs, and fold those of constants;
            to what these are decomposed into otherwise.
        fits: whether results will do, in the form of `call`'s, with nodes for tensors.

    Returns:
        The results; None where the function cannot be written, or they do not fit.
    """
    table = {} if is_canonical else _decompositions()
    values = [n.meta["val"] for n in inputs]
    try:
        of_any = (*values, node.meta.get("val"))  # a tensor that is made anew reads none
        mode = next(v.fake_mode for v in of_any if isinstance(v, FakeTensor))
        # A convolution asks for 16 images or more: 2 volumes of a depth of at most 8 would be held
        # to a depth of 8.
        with mode, without_guards(mode):
            # Two nodes may hold one value in their metadata: traced, it would be one input.
            own = [v.detach() if isinstance(v, FakeTensor) else v for v in values]
            traced = make_fx(call, dict(table), pre_dispatch=is_canonical, tracing_mode="symbolic")(
                *own
            )
    except NotImplementedError:
        return None
    if not fits(traced.graph.output_node().args[0]):
        return None
    made: dict[Node, Any] = {}
    given = iter(inputs)
    for inner in traced.graph.nodes:
        if inner.op == "placeholder":
            made[inner] = next(given)
        elif inner.op == "call_function" and "val" in inner.meta:  # checks have none
            with gm.graph.inserting_before(node):
                args: Any = map_arg(inner.args, lambda n: made[n])
                kwargs: Any = map_arg(inner.kwargs, lambda n: made[n])
                made[inner] = gm.graph.call_function(operator(inner.target), args, kwargs)
            made[inner].meta = {**node.meta, "val": inner.meta["val"]}
            if is_canonical:
                made[inner] = _folded(gm, made[inner])
    return map_arg(traced.graph.output_node().args[0], lambda n: made[n])


def _folded(gm: GraphModule, node: Node) -> Node:
    """The constant that a node gives; the node itself if it is none."""
    value = constant_of(gm, node)
    if value is not None:
        name = f"{node.all_input_nodes[0].target}_{node.name}"
    elif is_call(node, _FILLED) and not node.all_input_nodes:
        value, name = torch.full(*node.args[:2]), node.name  # type: ignore[arg-type]
        value = value.to(node.meta["val"].dtype)
    else:
        return node
    return Editor(gm).constant(name, value.contiguous(), like=node)


def _gives_all(node: Node, results: Any) -> bool:
    """True if a function gives every result of a node that is read, in its dtype."""
    if isinstance(results, Node):
        return bool(results.meta["val"].dtype == node.meta["val"].dtype)
    read = [u for u in node.users if is_getitem(u) and u.users]
    return all(u.args[1] < len(results) for u in read)  # type: ignore[operator]  # integers


def _replace(node: Node, results: Any) -> None:
    if isinstance(results, Node):
        node.replace_all_uses_with(results)
        return
    for user in [u for u in node.users if is_getitem(u) and u.users]:
        user.replace_all_uses_with(results[user.args[1]])
