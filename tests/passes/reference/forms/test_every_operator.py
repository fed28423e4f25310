"""Every operator of every form, written out: a form that no test writes may never have worked."""

import pytest
import torch
from torch import Tensor, nn

from pt2e_quant.core.integer_ops.profiles import PROFILES
from pt2e_quant.core.qdq import DequantizePerTensor, QuantizePerTensor
from pt2e_quant.graph.idioms.rms_norm import RmsNorm
from pt2e_quant.graph.ops import Overload
from pt2e_quant.passes.reference.forms.comparisons import COMPARISONS, EXTREME_PLACES
from pt2e_quant.passes.reference.forms.registry import FORMS
from tests.passes.reference.forms.between import (
    IMAGE,
    A,
    B,
    Between,
    Slopes,
    Y,
    integers,
    steps_apart,
)

aten = torch.ops.aten
ROWS, VOLUME, MATRIX = (2, 4, 15), (2, 4, 7, 6, 5), (6, 9)
TRUE = torch.ones(7, dtype=torch.bool)
PLACES = torch.tensor([2, 0, 1])
"""Of one tensor: its shape, what follows it in the call."""
ONE = {
    aten.max_pool1d.default: (ROWS, [3], [2], [1]),
    aten.max_pool2d.default: (IMAGE, [3, 2], [2], [1]),
    aten.max_pool3d.default: (VOLUME, [2], [2], [1]),
    aten.sum.default: (MATRIX,),
    aten.sum.dim_IntList: (IMAGE, [1, -1]),
    aten.cumsum.default: (IMAGE, -2),
    aten.linalg_vector_norm.default: (IMAGE, 2, [1, 3]),
    aten.var.default: (IMAGE,),
    aten.var.dim: (IMAGE, [1, 3], False, True),
    aten.var.correction: (IMAGE, [2]),
    aten.std.default: (IMAGE, False),
    aten.std.dim: (IMAGE, [-1]),
    aten.std.correction: (IMAGE, [1, 2]),
    aten.mean.default: (IMAGE,),
    aten.mean.dim: (IMAGE, [2]),
    aten.adaptive_avg_pool1d.default: (ROWS, [4]),
    aten.adaptive_avg_pool2d.default: (IMAGE, [4, 3]),
    aten.adaptive_avg_pool3d.default: (VOLUME, [3, 2, 4]),
    aten.avg_pool1d.default: (ROWS, [4], [3], [1]),
    aten.avg_pool2d.default: (IMAGE, [3], [2], [1]),
    aten.avg_pool3d.default: (VOLUME, [3], [2], [1]),
    aten.upsample_linear1d.vec: (ROWS, [20], False, None),
    aten.upsample_bilinear2d.vec: (IMAGE, [12, 9], False, None),
    aten.upsample_bicubic2d.vec: (IMAGE, [12, 9], False, None),
    aten.upsample_trilinear3d.vec: (VOLUME, [9, 8, 7], False, None),
    aten._upsample_nearest_exact1d.default: (ROWS, [20]),
    aten._upsample_nearest_exact2d.default: (IMAGE, [12, 9]),
    aten._upsample_nearest_exact3d.default: (VOLUME, [9, 8, 7]),
    aten.upsample_nearest1d.default: (ROWS, [20]),
    aten.upsample_nearest2d.default: (IMAGE, [12, 9]),
    aten.upsample_nearest3d.default: (VOLUME, [9, 8, 7]),
    aten._upsample_nearest_exact1d.vec: (ROWS, [20], None),
    aten._upsample_nearest_exact2d.vec: (IMAGE, [12, 9], None),
    aten._upsample_nearest_exact3d.vec: (VOLUME, [9, 8, 7], None),
    aten.upsample_nearest1d.vec: (ROWS, [20], None),
    aten.upsample_nearest2d.vec: (IMAGE, [12, 9], None),
    aten.upsample_nearest3d.vec: (VOLUME, [9, 8, 7], None),
    aten.glu.default: (IMAGE, 1),
    aten.hardswish.default: (IMAGE,),
    aten.hardswish_.default: (IMAGE,),
    aten.log_sigmoid.default: (IMAGE,),
    aten.gelu_.default: (IMAGE,),
    aten.softmax.int: (IMAGE, -1),
    aten._softmax.default: (IMAGE, -1, False),
    aten.log_softmax.int: (IMAGE, -1),
    aten._log_softmax.default: (IMAGE, 1, False),
    aten.layer_norm.default: (IMAGE, [7]),
    aten.group_norm.default: (IMAGE, 2),
    aten.rms_norm.default: (IMAGE, [7]),
    aten.instance_norm.default: (IMAGE, None, None, None, None, True, 0.1, 1e-5, True),
    aten.reshape.default: (IMAGE, [2, 36, 7]),
    aten.view.default: (IMAGE, [2, 36, 7]),
    aten._unsafe_view.default: (IMAGE, [2, 36, 7]),
    aten.flatten.using_ints: (IMAGE, 1, 2),
    aten.unflatten.int: (IMAGE, 1, [2, 2]),
    aten.view_as.default: (MATRIX, torch.ones(9, 6)),
    aten.permute.default: (IMAGE, [0, 2, 3, 1]),
    aten.transpose.int: (IMAGE, 1, 2),
    aten.t.default: (MATRIX,),
    aten.movedim.int: (IMAGE, 1, 3),
    aten.movedim.intlist: (IMAGE, [1, 2], [2, 3]),
    aten.swapaxes.default: (IMAGE, 1, 2),
    aten.numpy_T.default: (MATRIX,),
    aten.mT.default: (IMAGE,),
    aten.unsqueeze.default: (IMAGE, 1),
    aten.unsqueeze_.default: (IMAGE, 1),
    aten.squeeze.default: ((2, 1, 7),),
    aten.squeeze.dim: ((2, 1, 7), 1),
    aten.squeeze.dims: ((2, 1, 7), [1]),
    aten.slice.Tensor: (IMAGE, 2, 1, 8, 2),
    aten.select.int: (IMAGE, 2, 1),
    aten.narrow.default: (IMAGE, 2, 1, 3),
    aten.expand.default: ((2, 1, 7), [2, 3, 7]),
    aten.expand_as.default: ((2, 1, 7), torch.ones(2, 3, 7)),
    aten.broadcast_to.default: ((2, 1, 7), [2, 3, 7]),
    aten.alias.default: (IMAGE,),
    aten.detach.default: (IMAGE,),
    aten.detach_.default: (IMAGE,),
    aten.contiguous.default: (IMAGE,),
    aten.clone.default: (IMAGE,),
    aten.lift_fresh.default: (IMAGE,),
    aten.lift_fresh_copy.default: (IMAGE,),
    aten.flip.default: (IMAGE, [2]),
    aten.repeat.default: (IMAGE, [1, 2, 1, 1]),
    aten.tile.default: (IMAGE, [2, 1]),
    aten.index_select.default: (IMAGE, 1, PLACES),
    aten.gather.default: (IMAGE, 3, torch.arange(7).expand(2, 4, 9, 7).flip(3)),
    aten.amax.default: (IMAGE, [2, 3]),
    aten.amin.default: (IMAGE, [2, 3]),
    aten.pixel_shuffle.default: (IMAGE, 2),
    aten.pixel_unshuffle.default: ((2, 3, 6, 8), 2),
    aten.channel_shuffle.default: (IMAGE, 2),
    aten.roll.default: (IMAGE, [2], [3]),
    aten.repeat_interleave.self_int: (IMAGE, 3, 1),
    aten.diagonal.default: (IMAGE, 1, 2, 3),
    aten.unfold.default: (IMAGE, 2, 4, 3),
    aten.rot90.default: (IMAGE, 1, [2, 3]),
    aten.relu.default: (IMAGE,),
    aten.relu_.default: (IMAGE,),
    aten.relu6.default: (IMAGE,),
    aten.relu6_.default: (IMAGE,),
    aten.hardtanh.default: (IMAGE, -0.5, 0.7),
    aten.hardtanh_.default: (IMAGE, -0.5, 0.7),
    aten.clamp.default: (IMAGE, -0.5, 0.7),
    aten.clamp_.default: (IMAGE, -0.5, 0.7),
    aten.masked_fill.Scalar: (IMAGE, TRUE, 0.5),
    aten.masked_fill_.Scalar: (IMAGE, TRUE, 0.5),
    aten.pad.default: (IMAGE, [1, 2]),
    aten.constant_pad_nd.default: (IMAGE, [1, 2]),
}
"""Of two tensors: their shapes."""
TWO = {
    aten.matmul.default: (IMAGE, (7, 5)),
    aten.bmm.default: (ROWS, (2, 15, 3)),
    aten.mm.default: (MATRIX, (9, 4)),
    **{
        target: (IMAGE, IMAGE)
        for name in ("add", "sub", "mul", "div")
        for target in (getattr(aten, name).Tensor, getattr(aten, f"{name}_").Tensor)
    },
    aten.maximum.default: (IMAGE, IMAGE),
    aten.minimum.default: (IMAGE, IMAGE),
}
"""Choices among numbers: of a tensor and booleans."""
NUMBERS = {
    aten.where.ScalarOther: lambda x, seen: aten.where.ScalarOther(seen, x, 0.7),
    aten.where.ScalarSelf: lambda x, seen: aten.where.ScalarSelf(seen, -0.4, x),
}
JOINED = (aten.cat.default, aten.concat.default, aten.concatenate.default, aten.stack.default)
"""Of a tensor and a constant weight: both shapes, what follows them in the call."""
WEIGHTED = {
    aten.linear.default: (MATRIX, (5, 9)),
    aten.conv1d.default: (ROWS, (5, 4, 3)),
    aten.conv1d.padding: (ROWS, (5, 4, 3), None, [1], "same"),
    aten.conv2d.default: (IMAGE, (5, 4, 3, 2)),
    aten.conv2d.padding: (IMAGE, (5, 4, 3, 1), None, [1], "same"),
    aten.conv3d.default: (VOLUME, (5, 4, 3, 2, 1)),
    aten.conv3d.padding: (VOLUME, (5, 4, 3, 1, 5), None, [1], "same"),
    aten.conv_transpose1d.default: (ROWS, (4, 5, 3), None, [2]),
    aten.conv_transpose2d.input: (IMAGE, (4, 5, 3, 2), None, [2]),
    aten.conv_transpose3d.input: (VOLUME, (4, 5, 3, 2, 1), None, [2]),
    aten.addmm.default: (MATRIX, (9, 4)),
}
EVERY = {m.target if isinstance(m, Overload) else m for form in FORMS for m in form.operators}


class Weighted(nn.Module):
    """A float operator of a constant of 8 bits between q/dq."""

    def __init__(self, operator, shape) -> None:
        super().__init__()
        self.operator = operator
        self.register_buffer("w_q", integers(shape, B, seed=1))
        self.bias = nn.Parameter(torch.linspace(-1, 1, 4))

    def forward(self, x: Tensor) -> Tensor:
        weight = DequantizePerTensor(self.w_q, 0.017, 0, *B[2:])
        read = DequantizePerTensor(x, *A) if x.dtype == torch.int8 else x
        return QuantizePerTensor(self.operator(self, read, weight), *Y)


def judged(target):
    """The module and its integers, of a comparison or what chooses by one."""
    x, y = integers(IMAGE, A), integers(IMAGE, B, seed=1)
    if target is aten.where.self:
        return Between(lambda x, y, where: target(where, x, y), [A, B], Y), [x, y, x > 0]
    if target in NUMBERS:
        return Between(NUMBERS[target], [A], Y), [x, x > 0]
    if target in EXTREME_PLACES:
        return Between(lambda x: target(x, 2, True), [A], None), [x]
    if target._overloadname == "Scalar":
        return Between(lambda x: target(x, 0.31), [A], None), [x]
    return Between(target, [A, B], None), [x, y]


def chosen(target):
    """The module and its integers, of an operator that reads several tensors beside them."""
    x = integers(IMAGE, A)
    if target is aten.index.Tensor:
        others = [PLACES, torch.tensor([[6], [0]])]
        return Between(lambda x, i, j: target(x, [None, i, None, j]), [A], Y), [x, *others]
    return Between(lambda x, where: target(x, where, torch.tensor(0.5)), [A], Y), [x, TRUE]


def case(target):
    """The module and its integers."""
    if target in WEIGHTED:
        first, second, *rest = WEIGHTED[target]
        call = lambda _, x, w: target(x, w, *rest)  # noqa: E731
        if target is aten.addmm.default:
            call = lambda module, x, w: target(module.bias, x, w)  # noqa: E731
        return Weighted(call, second), [integers(first, A)]
    if target is aten.embedding.default:
        return Weighted(lambda _, x, w: target(w, x), MATRIX), [PLACES]
    if target in TWO or target in JOINED:
        shapes = TWO.get(target, (IMAGE, IMAGE))
        call = target if target in TWO else lambda x, y: target([x, y], 1)
        return Between(call, [A, B], Y), [integers(shapes[0], A), integers(shapes[1], B, seed=1)]
    if target in (aten.where.self, *NUMBERS, *COMPARISONS, *EXTREME_PLACES):
        return judged(target)
    if target is aten.zeros.default:
        return Between(lambda index: target([index.shape[0], 3]), [], Y), [PLACES]
    if target is aten.prelu.default:
        return Slopes(torch.tensor([0.3, -0.7, 0.0, 1.4])), [integers(IMAGE, A)]
    if target is aten.batch_norm.default:
        norm = nn.BatchNorm2d(4)
        nn.init.uniform_(norm.running_mean, -0.5, 0.5)
        nn.init.uniform_(norm.running_var, 0.5, 2.0)
        return Between(norm, [A], Y), [integers(IMAGE, A)]
    if target is RmsNorm:
        return Between(lambda x: target(x, [-1], 1e-5), [A], Y), [integers(IMAGE, A)]
    if target in (aten.index.Tensor, aten.masked_fill.Tensor, aten.masked_fill_.Tensor):
        return chosen(target)
    shape, *rest = ONE[target]
    tensors = [value for value in rest if isinstance(value, Tensor)]

    def call(x: Tensor, *given: Tensor) -> Tensor:
        found = iter(given)
        return target(x, *(next(found) if isinstance(v, Tensor) else v for v in rest))

    return Between(call, [A], Y), [integers(shape, A), *tensors]


@pytest.mark.parametrize("target", sorted(EVERY, key=str), ids=str)
def test_operator_when_written_in_integers_then_within_a_step(target):
    model, inputs = case(target)
    assert steps_apart(model, *inputs) <= 1


class Holding(nn.Module):
    """A module whose last inputs, places or booleans, are constants."""

    def __init__(self, model, given) -> None:
        super().__init__()
        self.model, self.count = model, len(given)
        for i, value in enumerate(given):
            self.register_buffer(f"given_{i}", value)

    def forward(self, *xs: Tensor) -> Tensor:
        return self.model(*xs, *(getattr(self, f"given_{i}") for i in range(self.count)))


def is_beside(value: Tensor) -> bool:
    return value.dtype in (torch.int64, torch.bool)


BESIDE = [t for t in sorted(EVERY, key=str) if any(map(is_beside, case(t)[1][1:]))]


@pytest.mark.parametrize("target", BESIDE, ids=str)
def test_operator_when_places_or_booleans_are_constants_then_within_a_step(target):
    model, inputs = case(target)
    held = [value for value in inputs if is_beside(value)]
    assert steps_apart(Holding(model, held), *inputs[: -len(held)]) <= 1


@pytest.mark.parametrize("profile", ["xnnpack", "onnxruntime_x86", "onednn", "tflite", "tosa"])
@pytest.mark.parametrize("target", [aten.mean.default, aten.sum.default, aten.std.default], ids=str)
def test_reduction_when_over_every_dimension_then_each_profile_has_it(target, profile):
    model, inputs = case(target)
    assert steps_apart(model, *inputs, profile=PROFILES[profile]) <= 1
