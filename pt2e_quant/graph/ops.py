"""Operators by meaning: tuples of the spellings that compute the same thing.

A family lists every ATen overload (in-place and out-of-place) that `torch.export` may write for
one operation. Where only some arguments make an overload a member (`hardtanh(0, 6)` is a relu6),
the entry is a `Spelling`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from operator import getitem
from typing import Any, TypeAlias, cast

import torch
from torch._ops import OpOverload
from torch.fx import Node

aten: Any = torch.ops.aten

Target: TypeAlias = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Spelling:
    """One overload, and the arguments it must have to count as a member of its family."""

    target: Target
    fixed: tuple[tuple[str, object], ...] = ()

    def accepts(self, node: Node) -> bool:
        """Whether a node that calls `target` has the fixed arguments."""
        if not self.fixed:
            return True
        found = arguments(node)
        return all(found.get(name, _ABSENT) == value for name, value in self.fixed)


Family: TypeAlias = tuple[Target | Spelling, ...]

_ABSENT = object()


def spelled(target: Target, **fixed: object) -> Spelling:
    """A member of a family that holds only with these arguments."""
    return Spelling(target, tuple(fixed.items()))


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


def is_getitem(node: Node) -> bool:
    """Whether a node takes one element of a tuple or list value."""
    return node.op == "call_function" and node.target is getitem


def is_call(node: Node, family: Family) -> bool:
    """Whether a node calls a member of a family."""
    if node.op != "call_function":
        return False
    target = node.target
    for member in family:  # asked of every node by every pass: a generator takes twice as long
        if member is target:
            return True
        if type(member) is Spelling and member.target is target and member.accepts(node):
            return True
    return False


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
    return cast("OpOverload | None", getattr(packet, target._overloadname, None))


@cache
def is_in_place(target: OpOverload) -> bool:
    """Whether an overload writes into its first argument and returns it."""
    schema = target._schema
    first = schema.arguments[0].alias_info if schema.arguments else None
    return (
        first is not None
        and first.is_write
        and len(schema.returns) == 1
        and schema.returns[0].alias_info is not None
    )


CONV1D: Family = (aten.conv1d.default, aten.conv1d.padding)
CONV2D: Family = (aten.conv2d.default, aten.conv2d.padding)
CONV3D: Family = (aten.conv3d.default, aten.conv3d.padding)
CONV: Family = CONV1D + CONV2D + CONV3D
CONV_TRANSPOSE1D: Family = (aten.conv_transpose1d.default,)
CONV_TRANSPOSE2D: Family = (aten.conv_transpose2d.input,)
CONV_TRANSPOSE3D: Family = (aten.conv_transpose3d.input,)
CONV_TRANSPOSE: Family = CONV_TRANSPOSE1D + CONV_TRANSPOSE2D + CONV_TRANSPOSE3D
CONVOLUTION: Family = (aten.convolution.default,)
LINEAR: Family = (aten.linear.default,)
ADDMM: Family = (aten.addmm.default,)
MATMUL: Family = (aten.matmul.default,)
BMM: Family = (aten.bmm.default,)
MM: Family = (aten.mm.default,)
EMBEDDING: Family = (aten.embedding.default,)
SDPA: Family = (aten.scaled_dot_product_attention.default,)
RECURRENT: Family = (
    aten.lstm.input,
    aten.gru.input,
    aten.rnn_tanh.input,
    aten.rnn_relu.input,
)
RECURRENT_CELL: Family = (
    aten.lstm_cell.default,
    aten.gru_cell.default,
    aten.rnn_tanh_cell.default,
    aten.rnn_relu_cell.default,
)

BATCH_NORM: Family = (
    aten.batch_norm.default,
    aten._native_batch_norm_legit_no_training.default,
    aten._native_batch_norm_legit.default,
    aten._batch_norm_with_update.default,
    aten._batch_norm_no_update.default,
    aten.native_batch_norm.default,
    aten.cudnn_batch_norm.default,
)
LAYER_NORM: Family = (aten.layer_norm.default, aten.native_layer_norm.default)
GROUP_NORM: Family = (aten.group_norm.default,)
DROPOUT: Family = (
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

ADD: Family = (aten.add.Tensor, aten.add_.Tensor)
SUB: Family = (aten.sub.Tensor, aten.sub_.Tensor)
MUL: Family = (aten.mul.Tensor, aten.mul_.Tensor)
DIV: Family = (aten.div.Tensor, aten.div_.Tensor)
MAXIMUM: Family = (aten.maximum.default,)
MINIMUM: Family = (aten.minimum.default,)

RELU: Family = (aten.relu.default, aten.relu_.default)
RELU6: Family = (
    aten.relu6.default,
    aten.relu6_.default,
    spelled(aten.hardtanh.default, min_val=0, max_val=6),
    spelled(aten.hardtanh_.default, min_val=0, max_val=6),
    spelled(aten.clamp.default, min=0, max=6),
    spelled(aten.clamp_.default, min=0, max=6),
)
HARDTANH: Family = (aten.hardtanh.default, aten.hardtanh_.default)
CLAMP: Family = (aten.clamp.default, aten.clamp_.default)
LEAKY_RELU: Family = (aten.leaky_relu.default, aten.leaky_relu_.default)
PRELU: Family = (aten.prelu.default,)
ELU: Family = (aten.elu.default, aten.elu_.default)
GELU: Family = (aten.gelu.default, aten.gelu_.default)
SILU: Family = (aten.silu.default, aten.silu_.default)
SIGMOID: Family = (aten.sigmoid.default, aten.sigmoid_.default)
TANH: Family = (aten.tanh.default, aten.tanh_.default)
HARDSWISH: Family = (aten.hardswish.default, aten.hardswish_.default)
HARDSIGMOID: Family = (aten.hardsigmoid.default, aten.hardsigmoid_.default)
SOFTMAX: Family = (aten.softmax.int, aten._softmax.default)
LOG_SOFTMAX: Family = (aten.log_softmax.int, aten._log_softmax.default)
MASKED_FILL: Family = (
    aten.masked_fill.Scalar,
    aten.masked_fill.Tensor,
    aten.masked_fill_.Scalar,
    aten.masked_fill_.Tensor,
)
WHERE: Family = (
    aten.where.self,
    aten.where.ScalarOther,
    aten.where.ScalarSelf,
    aten.where.Scalar,
)

MAX_POOL1D: Family = (aten.max_pool1d.default,)
MAX_POOL2D: Family = (aten.max_pool2d.default, aten.max_pool2d_with_indices.default)
MAX_POOL3D: Family = (aten.max_pool3d.default,)
AVG_POOL1D: Family = (aten.avg_pool1d.default,)
AVG_POOL2D: Family = (aten.avg_pool2d.default,)
ADAPTIVE_AVG_POOL1D: Family = (aten.adaptive_avg_pool1d.default,)
ADAPTIVE_AVG_POOL2D: Family = (aten.adaptive_avg_pool2d.default,)
ADAPTIVE_MAX_POOL2D: Family = (aten.adaptive_max_pool2d.default,)
MEAN: Family = (aten.mean.dim,)
CAT: Family = (aten.cat.default, aten.concat.default, aten.concatenate.default)
STACK: Family = (aten.stack.default,)
PAD: Family = (aten.pad.default, aten.constant_pad_nd.default)

RESHAPE: Family = (
    aten.reshape.default,
    aten.view.default,
    aten._unsafe_view.default,
    aten.flatten.using_ints,
    aten.unflatten.int,
    aten.view_as.default,
)
UNSQUEEZE: Family = (aten.unsqueeze.default, aten.unsqueeze_.default)
SQUEEZE: Family = (aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)
PERMUTE: Family = (
    aten.permute.default,
    aten.transpose.int,
    aten.t.default,
    aten.movedim.int,
    aten.movedim.intlist,
    aten.swapaxes.default,
    aten.numpy_T.default,
    aten.mT.default,
)
EXPAND: Family = (aten.expand.default, aten.expand_as.default, aten.broadcast_to.default)
SLICE: Family = (aten.slice.Tensor,)
SELECT: Family = (aten.select.int, aten.narrow.default)
SPLIT: Family = (
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.split.sizes,
    aten.chunk.default,
    aten.unbind.int,
    aten.tensor_split.sections,
    aten.tensor_split.indices,
)
IDENTITIES: Family = (
    aten.alias.default,
    aten.detach.default,
    aten.detach_.default,
    aten.contiguous.default,
    aten.clone.default,
    aten.lift_fresh.default,
    aten.lift_fresh_copy.default,
)
CASTS: Family = (
    aten.to.dtype,
    aten.to.dtype_layout,
    aten.to.device,
    aten._to_copy.default,
    aten.type_as.default,
)
VIEWS: Family = RESHAPE + UNSQUEEZE + SQUEEZE + PERMUTE + EXPAND + SLICE + SELECT + IDENTITIES
