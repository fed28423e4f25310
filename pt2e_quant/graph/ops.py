"""Operators by meaning: tuples of the overloads that compute the same thing.

Each tuple lists every ATen overload (in-place and out-of-place) that `torch.export` may write for
one operation. Where only some arguments count an overload in (`hardtanh(0, 6)` is a relu6),
the entry is an `Overload`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from operator import getitem
from typing import Any, TypeAlias, TypeGuard

import torch
from torch._ops import OpOverload
from torch.fx import Node

from pt2e_quant.core.recurrent_ops import RecurrentLayer

aten: Any = torch.ops.aten

Target: TypeAlias = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Overload:
    """One overload, and the arguments it must have to count as one of an operator's."""

    target: Target
    fixed: tuple[tuple[str, object], ...] = ()

    def accepts(self, node: Node) -> bool:
        """True if a node that calls `target` has the fixed arguments."""
        if not self.fixed:
            return True
        found = arguments(node)
        return all(found.get(name, _ABSENT) == value for name, value in self.fixed)


Overloads: TypeAlias = tuple[Target | Overload, ...]

_ABSENT = object()


def overload(target: Target, **fixed: object) -> Overload:
    """An overload that counts only with these arguments."""
    return Overload(target, tuple(fixed.items()))


@dataclass(frozen=True, slots=True)
class Parameter:
    """One argument of an operator's schema."""

    name: str
    required: bool
    default: object
    kwarg_only: bool


@cache
def parameters(target: OpOverload) -> tuple[Parameter, ...]:
    """The schema's arguments in order."""
    return tuple(
        Parameter(a.name, not a.has_default_value(), a.default_value, a.kwarg_only)
        for a in target._schema.arguments
    )


def arguments(node: Node) -> dict[str, Any]:
    """A node's arguments by schema name, in schema order, with defaults filled in.

    Targets without a schema (`operator.getitem`, symbolic arithmetic) get their positions
    as names: "0", "1", …
    """
    if not isinstance(node.target, OpOverload):
        named: dict[str, Any] = {str(i): a for i, a in enumerate(node.args)}
        return named | dict(node.kwargs)
    args, kwargs = node.args, node.kwargs
    return {
        p.name: args[i] if i < len(args) else kwargs.get(p.name, p.default)
        for i, p in enumerate(parameters(node.target))
    }


def argument(node: Node, name: str) -> Any:
    """One argument of a node by its schema name, its default if not given."""
    return arguments(node)[name]


def operand_names(call: Node) -> tuple[str, str]:
    """The names of what a layer reads, and of the weight that it multiplies with it.

    Of a recurrent layer it is the weight of the inputs.
    """
    return ("x", "w_ih") if call.target is RecurrentLayer else ("input", "weight")


def layer_operands(call: Node) -> tuple[Node, Node]:
    """The tensor that a layer reads, and the weight that it multiplies with it."""
    data, weight = (argument(call, name) for name in operand_names(call))
    return data, weight


def each_axis(given: Any, rank: int) -> list[int]:
    """A number for each of so many axes, where one alone stands for all.

    >>> each_axis(2, 3), each_axis([1], 2), each_axis((1, 2), 2)
    ([2, 2, 2], [1, 1], [1, 2])
    """
    numbers = [given] if isinstance(given, int) else list(given)
    return numbers * rank if len(numbers) == 1 else numbers


def each_padding(
    given: Any, kernel: Sequence[int], dilation: Sequence[int]
) -> list[tuple[int, int]]:
    """A convolution's padding before and behind each axis, which may be given by a name.

    >>> each_padding("same", [3, 2], [1, 1]), each_padding("valid", [3], [1])
    ([(1, 1), (0, 1)], [(0, 0)])
    >>> each_padding([1], [3, 3], [1, 1])
    [(1, 1), (1, 1)]
    """
    if not isinstance(given, str):
        return [(pad, pad) for pad in each_axis(given, len(kernel))]
    is_same = given == "same"
    spans = [d * (k - 1) if is_same else 0 for d, k in zip(dilation, kernel, strict=True)]
    return [(span // 2, span - span // 2) for span in spans]


def is_getitem(node: Node) -> bool:
    """True if a node takes one element of a tuple or list value."""
    return node.op == "call_function" and node.target is getitem


def is_call(node: Node, overloads: Overloads) -> bool:
    """True if a node calls one of some overloads."""
    if node.op != "call_function":
        return False
    target = node.target
    for member in overloads:  # asked of every node by every pass: a generator takes twice as long
        if member is target:
            return True
        if type(member) is Overload and member.target is target and member.accepts(node):
            return True
    return False


def fill_number(node: Node) -> Any:
    """What a call fills a tensor with: a number, or a node that computes it; None for others."""
    if not is_call(node, FILLS):
        return None
    return arguments(node).get("fill_value", 1.0 if "ones" in str(node.target) else 0.0)


def is_depthwise(conv: Node) -> bool:
    """True if each result channel of a convolution is made of one input channel of its own."""
    given = arguments(conv)
    shape = given["weight"].meta["val"].shape
    return bool(shape[1] == 1 and given["groups"] == shape[0])


def calls(value: object, overloads: Overloads) -> TypeGuard[Node]:
    """True for a node that calls one of some overloads; an operand may be a number."""
    return isinstance(value, Node) and is_call(value, overloads)


@cache
def out_of_place(target: OpOverload) -> OpOverload | None:
    """The overload that returns what an in-place overload would have written, if there is one.

    >>> out_of_place(torch.ops.aten.relu_.default)
    <OpOverload(op='aten.relu', overload='default')>
    """
    namespace, name = target._schema.name.split("::")
    if not name.endswith("_") or name.endswith("__"):
        return None
    packet = getattr(getattr(torch.ops, namespace), name[:-1], None)
    if packet is None:
        return None
    # An overload has not always the name of its twin: pow_.Scalar is pow.Tensor_Scalar.
    twins: list[OpOverload] = [
        getattr(packet, overload)
        for overload in packet.overloads()
        if _kinds(getattr(packet, overload)) == _kinds(target)
    ]
    same = [twin for twin in twins if twin._overloadname == target._overloadname]
    return next(iter(same or twins), None)


def _kinds(target: OpOverload) -> list[str]:
    """The type of each argument, whether it is written or not."""
    return [str(a.type) for a in target._schema.arguments]


@cache
def is_in_place(target: OpOverload) -> bool:
    """True if an overload writes into its first argument and returns it."""
    schema = target._schema
    first = schema.arguments[0].alias_info if schema.arguments else None
    return (
        first is not None
        and first.is_write
        and len(schema.returns) == 1
        and schema.returns[0].alias_info is not None
    )


CONV1D: Overloads = (aten.conv1d.default, aten.conv1d.padding)
CONV2D: Overloads = (aten.conv2d.default, aten.conv2d.padding)
CONV3D: Overloads = (aten.conv3d.default, aten.conv3d.padding)
CONV: Overloads = CONV1D + CONV2D + CONV3D
CONV_TRANSPOSE1D: Overloads = (aten.conv_transpose1d.default,)
CONV_TRANSPOSE2D: Overloads = (aten.conv_transpose2d.input,)
CONV_TRANSPOSE3D: Overloads = (aten.conv_transpose3d.input,)
CONV_TRANSPOSE: Overloads = CONV_TRANSPOSE1D + CONV_TRANSPOSE2D + CONV_TRANSPOSE3D
LINEAR: Overloads = (aten.linear.default,)
ADDMM: Overloads = (aten.addmm.default,)
MATMUL: Overloads = (aten.matmul.default,)
BMM: Overloads = (aten.bmm.default,)
MM: Overloads = (aten.mm.default,)
EMBEDDING: Overloads = (aten.embedding.default,)
SDPA: Overloads = (aten.scaled_dot_product_attention.default,)
RECURRENT: Overloads = (
    aten.lstm.input,
    aten.gru.input,
    aten.rnn_tanh.input,
    aten.rnn_relu.input,
)
RECURRENT_CELL: Overloads = (
    aten.lstm_cell.default,
    aten.gru_cell.default,
    aten.rnn_tanh_cell.default,
    aten.rnn_relu_cell.default,
)

BATCH_NORM: Overloads = (
    aten.batch_norm.default,
    aten._native_batch_norm_legit_no_training.default,
    aten._native_batch_norm_legit.default,
    aten._batch_norm_with_update.default,
    aten._batch_norm_no_update.default,
    aten.native_batch_norm.default,
    aten.cudnn_batch_norm.default,
)
LAYER_NORM: Overloads = (aten.layer_norm.default, aten.native_layer_norm.default)
GROUP_NORM: Overloads = (aten.group_norm.default,)
INSTANCE_NORM: Overloads = (aten.instance_norm.default,)
NORMS: Overloads = (*LAYER_NORM, *GROUP_NORM, *INSTANCE_NORM)
"""Norms by the statistics of what they read."""
DROPOUT: Overloads = (
    aten.dropout.default,
    aten.dropout_.default,
    aten.feature_dropout.default,
    aten.feature_dropout_.default,
    aten.alpha_dropout.default,
    aten.alpha_dropout_.default,
    aten.feature_alpha_dropout.default,
    aten.feature_alpha_dropout_.default,
    aten.native_dropout.default,
)

ADD: Overloads = (aten.add.Tensor, aten.add_.Tensor)
SUB: Overloads = (aten.sub.Tensor, aten.sub_.Tensor)
MUL: Overloads = (aten.mul.Tensor, aten.mul_.Tensor)
DIV: Overloads = (aten.div.Tensor, aten.div_.Tensor)
MAXIMUM: Overloads = (aten.maximum.default,)
MINIMUM: Overloads = (aten.minimum.default,)

RELU: Overloads = (aten.relu.default, aten.relu_.default)
RELU6: Overloads = (
    aten.relu6.default,
    aten.relu6_.default,
    overload(aten.hardtanh.default, min_val=0, max_val=6),
    overload(aten.hardtanh_.default, min_val=0, max_val=6),
    overload(aten.clamp.default, min=0, max=6),
    overload(aten.clamp_.default, min=0, max=6),
)
HARDTANH: Overloads = (aten.hardtanh.default, aten.hardtanh_.default)
CLAMP: Overloads = (aten.clamp.default, aten.clamp_.default)
LEAKY_RELU: Overloads = (aten.leaky_relu.default, aten.leaky_relu_.default)
PRELU: Overloads = (aten.prelu.default,)
ELU: Overloads = (aten.elu.default, aten.elu_.default)
GELU: Overloads = (aten.gelu.default, aten.gelu_.default)
SILU: Overloads = (aten.silu.default, aten.silu_.default)
SIGMOID: Overloads = (aten.sigmoid.default, aten.sigmoid_.default)
TANH: Overloads = (aten.tanh.default, aten.tanh_.default)
HARDSWISH: Overloads = (aten.hardswish.default, aten.hardswish_.default)
HARDSIGMOID: Overloads = (aten.hardsigmoid.default, aten.hardsigmoid_.default)
ACTIVATIONS: Overloads = (
    *(*RELU, *RELU6, *HARDTANH, *CLAMP, *LEAKY_RELU, *ELU),
    *(*GELU, *SILU, *SIGMOID, *TANH, *HARDSWISH, *HARDSIGMOID),
)
"""Functions of each element of one tensor alone."""
SOFTMAX: Overloads = (aten.softmax.int, aten._softmax.default)
LOG_SOFTMAX: Overloads = (aten.log_softmax.int, aten._log_softmax.default)
FILLS_LIKE: Overloads = (
    *(aten.zeros_like.default, aten.ones_like.default, aten.full_like.default),
    *(aten.new_zeros.default, aten.new_ones.default, aten.new_full.default),
)
"""Operators that fill a tensor with one number and read the shape, dtype and device of another."""
FILLS: Overloads = (aten.zeros.default, aten.ones.default, aten.full.default, *FILLS_LIKE)
"""Operators that fill a tensor with one number."""
MASKED_FILL: Overloads = (
    aten.masked_fill.Scalar,
    aten.masked_fill.Tensor,
    aten.masked_fill_.Scalar,
    aten.masked_fill_.Tensor,
)
WHERE: Overloads = (
    aten.where.self,
    aten.where.ScalarOther,
    aten.where.ScalarSelf,
    aten.where.Scalar,
)

MAX_POOL1D: Overloads = (aten.max_pool1d.default,)
MAX_POOL2D: Overloads = (aten.max_pool2d.default, aten.max_pool2d_with_indices.default)
MAX_POOL3D: Overloads = (aten.max_pool3d.default,)
AVG_POOL1D: Overloads = (aten.avg_pool1d.default,)
AVG_POOL2D: Overloads = (aten.avg_pool2d.default,)
ADAPTIVE_AVG_POOL1D: Overloads = (aten.adaptive_avg_pool1d.default,)
ADAPTIVE_AVG_POOL2D: Overloads = (aten.adaptive_avg_pool2d.default,)
MEAN: Overloads = (aten.mean.dim,)
CAT: Overloads = (aten.cat.default, aten.concat.default, aten.concatenate.default)
STACK: Overloads = (aten.stack.default,)
PAD: Overloads = (aten.pad.default, aten.constant_pad_nd.default)

RESHAPE: Overloads = (
    aten.reshape.default,
    aten.view.default,
    aten._unsafe_view.default,
    aten.flatten.using_ints,
    aten.unflatten.int,
    aten.view_as.default,
)
UNSQUEEZE: Overloads = (aten.unsqueeze.default, aten.unsqueeze_.default)
SQUEEZE: Overloads = (aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)
RESIZE_NEAREST: Overloads = tuple(
    getattr(getattr(aten, f"{name}{rank}d"), overload)
    for name in ("upsample_nearest", "_upsample_nearest_exact")
    for rank in (1, 2, 3)
    for overload in ("vec", "default")
)

PERMUTE: Overloads = (
    aten.permute.default,
    aten.transpose.int,
    aten.t.default,
    aten.movedim.int,
    aten.movedim.intlist,
    aten.swapaxes.default,
    aten.numpy_T.default,
    aten.mT.default,
)
EXPAND: Overloads = (aten.expand.default, aten.expand_as.default, aten.broadcast_to.default)
SLICE: Overloads = (aten.slice.Tensor,)
SELECT: Overloads = (aten.select.int, aten.narrow.default)
SPLIT: Overloads = (
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.split.sizes,
    aten.chunk.default,
    aten.unbind.int,
    aten.tensor_split.sections,
    aten.tensor_split.indices,
)
IDENTITIES: Overloads = (
    aten.alias.default,
    aten.detach.default,
    aten.detach_.default,
    aten.contiguous.default,
    aten.clone.default,
    aten.lift_fresh.default,
    aten.lift_fresh_copy.default,
)
CASTS: Overloads = (
    aten.to.dtype,
    aten.to.dtype_layout,
    aten.to.device,
    aten._to_copy.default,
    aten.type_as.default,
)
VIEWS: Overloads = RESHAPE + UNSQUEEZE + SQUEEZE + PERMUTE + EXPAND + SLICE + SELECT + IDENTITIES
