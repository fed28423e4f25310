"""The functions that are written out where a runtime lacks them, by operator with its overload."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch._ops import OpOverload

from pt2e_quant.passes.functions import (
    draws,
    elementwise,
    layers,
    matrices,
    places,
    resizes,
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
    "aten.adaptive_avg_pool1d.default": resizes.adaptive_avg_pool,
    "aten.adaptive_avg_pool2d.default": resizes.adaptive_avg_pool,
    "aten.adaptive_avg_pool3d.default": resizes.adaptive_avg_pool,
    "aten._upsample_bicubic2d_aa.default": resizes.antialiased(resizes.cubic, by_axis=True),
    "aten._upsample_bicubic2d_aa.vec": resizes.antialiased(resizes.cubic),
    "aten._upsample_bilinear2d_aa.default": resizes.antialiased(resizes.triangle, by_axis=True),
    "aten._upsample_bilinear2d_aa.vec": resizes.antialiased(resizes.triangle),
    "aten._upsample_lanczos2d_aa.default": resizes.antialiased(resizes.lanczos, by_axis=True),
    "aten._upsample_lanczos2d_aa.vec": resizes.antialiased(resizes.lanczos),
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
    "aten.bernoulli.default": draws.bernoulli,
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
    "aten.dropout.default": draws.kept_by_dropout,
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
    "aten.upsample_bicubic2d.vec": resizes.bicubic,
    "transformers.grouped_mm_fallback.default": sizes_of_run_time.grouped_product,
}
"""Every function, by operator with its overload."""


OF_IMAGES = {
    name for name, function in FUNCTIONS.items() if function.__module__ == resizes.__name__
}
"""Functions that are constant matrices or filters and the operators which read them: decomposed,
a product would read a copy of its matrix for each image and channel."""
LEAVES = {
    form: _MATRICES[str(form)]
    for form in _overloads(name.split(".")[1] for name in _MATRICES)
    if str(form) in _MATRICES
}
"""Operators that `torch.export`'s decompositions keep."""
