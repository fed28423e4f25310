"""The distance of two correct computations of one graph, by float rounding alone.

A deep quantized graph can amplify rounding: a sum that differs in its last bit moves one value in
a hundred thousand by a quantization step, the next layer more of them, and after twelve blocks a
fifth of the values differ. No artifact can then be nearer to the graph than the graph is to itself
on another machine.

A step function (a comparison, a floor, an index) makes a difference of any size of the least one.
Runtimes that round sums and quantized values their own way flip some of its results.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import GraphModule, Interpreter, Node
from torch.utils import _pytree as pytree

from pt2e_quant.core.qdq import is_dequantize, is_quantize
from pt2e_quant.core.read_capture import capture_of
from pt2e_quant.flow.calibrate.calibrate import preserve_buffers
from pt2e_quant.graph.ops import arguments

DRAWS = 16
"""Runs with noise. An artifact that differs from the graph by rounding alone is one more draw of
their distribution: it is further away than all of them once in 17 times at most."""

FLIP_DRAWS = 64
"""Runs with flipped steps. In a small result a few values flip, each by as much as a result, so
that runs differ more than those with rounding noise."""

_FLIPS_MARGIN_DB = 3.0
"""The margin of an artifact's flips over those of any draw: they are few, and as
many calls are judged, each may be the one in 17."""

aten = torch.ops.aten

_SUMMED = 2.0**-21
"""Noise of an operator that sums, relative to its result's root mean square.

Torch's float32 products on a CPU are 1.2 (64 terms), 2.4 (512) to 3.0 (8192) times 2^-23 from their
float64 result, and two computations that share nothing but that are sqrt(2) times further apart.
"""

_DISTURBED = 0.01
"""Noise of an operator that sums where runtimes compute their own way, relative likewise: 40 dB.
Three such operators one behind the other are as far apart as the gate lets float results be."""

_STEPS = 1 / 8
"""The share of quantized elements that such a runtime rounds to a neighbouring step."""

_ROUNDED = 2.0**-23
"""Noise of any other operator, relative to each element: one rounding or an approximated function
(0.2 to 0.6 times 2^-23, measured likewise), of two computations."""

_SUMS = frozenset(
    packet
    for name in (
        *("linear", "mm", "bmm", "addmm", "baddbmm", "matmul", "einsum", "dot", "mv"),
        *("conv1d", "conv2d", "conv3d", "convolution", "conv_transpose1d", "conv_transpose2d"),
        *("conv_transpose3d", "scaled_dot_product_attention", "sum", "mean", "avg_pool1d"),
        *("avg_pool2d", "avg_pool3d", "adaptive_avg_pool1d", "adaptive_avg_pool2d", "var", "std"),
        *("batch_norm", "layer_norm", "group_norm", "instance_norm", "native_layer_norm"),
        *("cumsum", "lstm", "gru", "linalg_vector_norm", "cdist"),
    )
    if (packet := getattr(aten, name, None)) is not None
)
"""The operators that add up many products or values."""

_CASTS = frozenset((aten.to, aten._to_copy, aten.type_as))

_FLOORS = frozenset((aten.floor, aten.ceil, aten.trunc, aten.round, aten.div, aten.floor_divide))
"""Operators whose float result flips by one; a division only with a rounding mode."""

_REMAINDERS = frozenset((aten.remainder, aten.fmod, aten.frac))
"""Operators whose result flips by the divisor."""

_SIGNS = frozenset((aten.sign, aten.sgn, aten.heaviside))

_JUMPS = frozenset((aten.hardshrink, aten.threshold, aten.copysign, aten.atan2, aten.angle))
"""Functions that are smooth but for a jump."""


class NoisyInterpreter(Interpreter):
    """Adds rounding noise to each float result of arithmetic.

    A dequantize's result is exact by definition, and a view's is its input.

    Args:
        gm: the graph.
        draw: which noise.
        summed: noise of an operator that sums, relative to its result's root mean square.
        moves_steps: whether _STEPS of the quantized integers move by a step, as on a runtime that
            rounds values its own way.
    """

    def __init__(
        self, gm: GraphModule, draw: int, *, summed: float = _SUMMED, moves_steps: bool = False
    ) -> None:
        super().__init__(gm)
        self.generator = torch.Generator().manual_seed(draw)
        self.summed = summed
        self.moves_steps = moves_steps

    def run_node(self, n: Node) -> Any:
        """Run one node, with noise on its result."""
        return self.with_noise(n, super().run_node(n))

    def with_noise(self, n: Node, value: Any) -> Any:
        """A node's result with noise."""
        if n.op != "call_function" or is_dequantize(n) or _is_view(n):
            return value
        if is_quantize(n):
            return self._stepped(n, value) if self.moves_steps else value
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        noise = torch.randn(value.shape, generator=self.generator).to(value)
        if _packet(n) in _SUMS:
            size = value.detach().square().mean().sqrt() * self.summed
        else:
            size = value.detach().abs() * _ROUNDED
        return value + noise * size.nan_to_num(0.0, 0.0, 0.0)

    def _stepped(self, quantize: Node, value: Any) -> Any:
        """Some of a quantize's integers moved by a step, within the range that it clamps to."""
        values = arguments(quantize)
        bounds = values.get("quant_min"), values.get("quant_max")
        if not isinstance(value, Tensor) or not all(isinstance(b, int) for b in bounds):
            return value
        moved = torch.rand(value.shape, generator=self.generator) < _STEPS
        up = torch.rand(value.shape, generator=self.generator) < 0.5
        steps = torch.where(up, 1, -1) * moved
        return (value.long() + steps.to(value.device)).clamp(*bounds).to(value.dtype)


class _Disturbed(NoisyInterpreter):
    """Disturbed as runtimes may be; keeps what each step function reads and gives."""

    def __init__(self, gm: GraphModule, draw: int) -> None:
        super().__init__(gm, draw, summed=_DISTURBED, moves_steps=True)
        self.steps: dict[Node, tuple[list[Any], Any]] = {}

    def run_node(self, n: Node) -> Any:
        """Run one node; a step function without noise of its own."""
        value = Interpreter.run_node(self, n)
        read = _read(self, n) if _may_be_step(n) else []
        if not _is_step(n, read, value):
            return self.with_noise(n, value)
        kept = pytree.tree_map_only(Tensor, torch.clone, (read, value))
        self.steps[n] = kept
        return value


class _Flipped(Interpreter):
    """Exact but for the results of step functions that were flipped elsewhere."""

    def __init__(self, gm: GraphModule, steps: dict[Node, tuple[list[Any], Any]]) -> None:
        super().__init__(gm)
        self.steps = steps

    def run_node(self, n: Node) -> Any:
        """Run one node; a step function's result is that of the other run where it flipped."""
        value = super().run_node(n)
        if n not in self.steps:
            return value
        there, flipped = self.steps[n]
        here = _read(self, n)
        left, spec = pytree.tree_flatten(value)
        right = pytree.tree_leaves(flipped)
        made = [_merged(n, a, b, here, there) for a, b in zip(left, right, strict=True)]
        return pytree.tree_unflatten(made, spec)


class ShiftedInterpreter(Interpreter):
    """Adds a number to one value.

    Args:
        gm: the graph.
        place: the node whose value is shifted.
        by: the number.
    """

    def __init__(self, gm: GraphModule, place: Node, by: float) -> None:
        super().__init__(gm)
        self.place = place
        self.by = by

    def run_node(self, n: Node) -> Any:
        """Run one node."""
        value = super().run_node(n)
        return value + self.by if n is self.place else value


def _is_view(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(r.alias_info is not None for r in schema.returns)


def _packet(node: Node) -> Any:
    return getattr(node.target, "overloadpacket", None)


def _read(interpreter: Interpreter, node: Node) -> list[Any]:
    """The tensors and numbers that a node reads, in order."""
    return pytree.tree_leaves(interpreter.fetch_args_kwargs_from_env(node))


def _may_be_step(node: Node) -> bool:
    """True if it is an operator that writes into nothing, and no q/dq: their steps are moved."""
    target = node.target
    return (
        isinstance(target, OpOverload)
        and target.namespace not in ("quantized_decomposed", "pt2e_quant")
        and not target._schema.is_mutable
    )


def _is_step(node: Node, read: list[Any], value: Any) -> bool:
    """True if a node makes steps of floats: integers or bools, or a float function of steps."""
    if not any(isinstance(v, Tensor) and v.is_floating_point() for v in read):
        return False
    results = [v for v in pytree.tree_leaves(value) if isinstance(v, Tensor)]
    if any(not v.is_floating_point() and not v.is_complex() for v in results):
        return True
    packet = _packet(node)
    if packet is aten.div:
        return arguments(node).get("rounding_mode") is not None
    return packet in _FLOORS | _REMAINDERS | _SIGNS | _JUMPS


def _merged(node: Node, here: Any, there: Any, read: list[Any], read_there: list[Any]) -> Any:
    """One result of a step function, flipped where it is another step in the disturbed run.

    What only moves with the values that are read is no flip: a floor of numbers beyond a thousand
    has other results for other sums.
    """
    if not isinstance(here, Tensor) or here.shape != there.shape or here.is_complex():
        return here
    packet = _packet(node)
    if not here.is_floating_point() and packet not in _CASTS:
        return there
    moved = (there.double() - here.double()).abs()
    if packet in _CASTS or packet in _FLOORS:
        return torch.where(moved <= 1, there, here)
    if packet in _SIGNS:
        return there
    if packet not in _REMAINDERS and packet not in _JUMPS:
        return here  # Beside indices stand the values that they choose, which do not jump.
    by = [
        (a.double() - b.double()).abs()
        for a, b in zip(read, read_there, strict=True)
        if isinstance(a, Tensor) and a.shape == b.shape
    ]
    if packet in _JUMPS:
        return torch.where(moved > 2 * sum(by), there, here)
    unit = 1.0 if packet is aten.frac else torch.as_tensor(read[1]).double().abs()
    return torch.where((moved > unit / 2) & (by[0] < unit / 4), there, here)


def run_with_rounding_noise(gm: GraphModule, *leaves: Any, draw: int = 0) -> Any:
    """The graph's result with noise of the size of float32 rounding after every operator.

    Args:
        gm: a graph; it may write its buffers, which the caller restores.
        leaves: the inputs in placeholder order.
        draw: which noise; the same draw of the same graph on as many threads is the same result.
    """
    return NoisyInterpreter(gm, draw).run(*leaves, enable_io_processing=False)


def run_with_moved_steps(gm: GraphModule, *leaves: Any, draw: int = 0) -> Any:
    """The graph's result where each quantize rounds one value in eight to a neighbouring step.

    Args:
        gm: a graph; it may write its buffers, which the caller restores.
        leaves: the inputs in placeholder order.
        draw: which values.
    """
    noisy = NoisyInterpreter(gm, draw, moves_steps=True)
    return noisy.run(*leaves, enable_io_processing=False)


def run_with_flipped_steps(gm: GraphModule, *leaves: Any, draw: int = 0) -> Any:
    """The graph's result where step functions flip as on another runtime, and all else is exact.

    Args:
        gm: a canonical graph; it may write its buffers, which the caller restores.
        leaves: the inputs in placeholder order.
        draw: which noise makes the steps flip.
    """
    disturbed = _Disturbed(gm, draw)
    copies = [v.clone() if isinstance(v, Tensor) else v for v in leaves]
    with preserve_buffers(gm, capture_of(gm)):
        disturbed.run(*copies, enable_io_processing=False)
    return _Flipped(gm, disturbed.steps).run(*leaves, enable_io_processing=False)


def flip_draws(gm: GraphModule) -> range:
    """The draws of a graph with flipped steps: FLIP_DRAWS, or none where it has no step function.

    An operator whose values are not known counts as one.
    """
    for node in gm.graph.nodes:
        if node.op == "call_function" and _may_be_step(node):
            values = [n.meta.get("val") for n in (node, *node.all_input_nodes)]
            if any(value is None for value in values) or _is_step(node, values[1:], values[0]):
                return range(FLIP_DRAWS)
    return range(0)


def bound_with_flips(bound_db: float, found_db: float, flips_db: Iterable[float]) -> float:
    """The least SQNR of a result behind step functions, which may flip beside what it is off by.

    Args:
        bound_db: of a result behind none.
        found_db: no more draws are looked at once this is enough.
        flips_db: of the graph to itself with flipped steps, a draw each.
    """
    bound = bound_db
    for ratio in flips_db:
        if math.isnan(ratio):
            continue
        flips = 10 ** ((_FLIPS_MARGIN_DB - ratio) / 10)
        bound = min(bound, -10 * math.log10(10 ** (-bound_db / 10) + flips))
        if bound <= found_db:
            break
    return bound
