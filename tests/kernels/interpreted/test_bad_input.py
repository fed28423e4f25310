"""What every launcher is given wrongly: layouts make no difference, and the rest is refused.

A tensor of a unit's own draw is spread over memory, cut, lengthened, cast or moved; the launcher
then gives what it gave before, or says what is wrong. It never gives other numbers.
"""

import pytest
import torch
from torch.utils import _pytree as pytree

from benchmarks.gpu_check import difference
from benchmarks.kernels.catalog import BENCHES
from pt2e_quant.core.errors import InputError, Pt2eQuantError
from tests.kernels.small_draws import small_seeds

CPU = torch.device("cpu")
# Activations: their rows are as many as they are, and their own units say which dtypes they take.
FREE = {
    "int8_linear": (0,),
    "int8_conv2d": (0,),
    "int8_matmul": (0, 1),
    "int4_linear": (0,),
    "a8w4_linear": (0,),
    "fp8_linear": (0,),
    "embedding_gather": (3,),
    "int8_cat": (0,),
    "int8_add": (0, 1),
    "softmax_quantize": (0,),
    "norm_quantize": (0,),
}
SEVERAL = [bench for bench in BENCHES if bench.op in FREE]
by_larger_unit = pytest.mark.parametrize("bench", SEVERAL, ids=lambda bench: bench.name)


class Drawn:
    """A unit's call, of which one tensor at a time is replaced."""

    def __init__(self, bench):
        self.bench = bench
        self.operands = bench.draw(CPU, small_seeds(bench)[0])
        self.leaves, self.spec = pytree.tree_flatten(self.operands)
        self.places = [i for i, v in enumerate(self.leaves) if isinstance(v, torch.Tensor)]
        self.good = bench.call(self.operands, None)

    def call_with(self, place, tensor):
        leaves = list(self.leaves)
        leaves[place] = tensor
        return self.bench.call(pytree.tree_unflatten(leaves, self.spec), None)

    def is_good(self, made):
        return difference(made, self.good, self.bench.bound(self.operands)) is None

    @property
    def fixed(self):
        return [i for i in self.places if i not in FREE[self.bench.op]]


def spread(tensor):
    """The same values, every second element of every axis."""
    wide = tensor.new_zeros([2 * size for size in tensor.shape])
    view = wide[tuple(slice(None, None, 2) for _ in tensor.shape)]
    return view.copy_(tensor)


@pytest.mark.parametrize("bench", BENCHES, ids=lambda bench: bench.name)
def test_launchers_when_tensors_are_not_contiguous_then_give_the_same(bench):
    drawn = Drawn(bench)
    for place in drawn.places:
        assert drawn.is_good(drawn.call_with(place, spread(drawn.leaves[place]))), place


@by_larger_unit
def test_launchers_when_lengths_are_others_then_refuse(bench):
    """But for one: a scale for all rows, a mask that broadcasts, a group a row are another call."""
    drawn = Drawn(bench)
    for place in drawn.fixed:
        tensor = drawn.leaves[place]
        for axis, size in enumerate(tensor.shape):
            longer = torch.cat([tensor, tensor.narrow(axis, 0, 1)], axis)
            for changed in (longer, tensor.narrow(axis, 0, size - 1)):
                if 1 not in (size, changed.shape[axis]):
                    with pytest.raises(Pt2eQuantError):
                        drawn.call_with(place, changed)


@by_larger_unit
def test_launchers_when_dtypes_are_others_then_refuse(bench):
    drawn = Drawn(bench)
    for place in drawn.fixed:
        is_float = drawn.leaves[place].is_floating_point()
        for dtype in (torch.int16, torch.int64) if is_float else (torch.int64, torch.bool):
            with pytest.raises(Pt2eQuantError):
                drawn.call_with(place, drawn.leaves[place].to(dtype))


@by_larger_unit
def test_launchers_when_one_tensor_is_on_another_device_then_refuse(bench):
    drawn = Drawn(bench)
    for place in drawn.places if len(drawn.places) > 1 else ():
        with pytest.raises(InputError, match="of one device"):
            drawn.call_with(place, drawn.leaves[place].to("meta"))
