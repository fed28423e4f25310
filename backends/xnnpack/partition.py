"""The partitioner: which operators ExecuTorch hands to the delegate in integers.

ExecuTorch's own settings take few operators in int8, though its XNNPACK runtime computes many
more. The settings are classes that a partitioner is given, so the operators that have a row in
the table get a setting that admits integers. All others keep ExecuTorch's.

Some calls stay outside of the delegate, where ExecuTorch's own operator runs them: its payload has
no field for some arguments, and XNNPACK refuses some values of others when the program is loaded.
ExecuTorch's partitioner (1.4) looks at neither.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch.fx
from executorch.backends.xnnpack.partition.config import ALL_PARTITIONER_CONFIGS
from executorch.backends.xnnpack.partition.config.gemm_configs import GEMMConfig, LinearConfig
from executorch.backends.xnnpack.partition.config.generic_node_configs import (
    CatConfig,
    EluConfig,
    GenericNodePartitionerConfig,
    MaxPool2dConfig,
    SliceCopyConfig,
    UpsampleBilinear2dConfig,
)
from executorch.backends.xnnpack.partition.config.node_configs import BatchNormConfig, PreluConfig
from executorch.backends.xnnpack.partition.config.xnnpack_config import (
    ConfigPrecisionType,
    XNNPartitionerConfig,
)
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.backends.xnnpack.utils.quant_utils import (
    IS_IMPLICIT_Q_DQ_TAG,
    is_dequant,
    is_tagged_as_implicit_q_dq,
)
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import Node

from pt2e_quant.backends.target.float_retries import Fallback, fallback_of
from pt2e_quant.backends.xnnpack.conditions import has_known_image
from pt2e_quant.backends.xnnpack.passes.scale_limits import why_beyond_scales
from pt2e_quant.backends.xnnpack.slices import AnyBatchSliceConfig

__all__ = []

_FUSED = ("relu.default", "hardtanh.default")
"""The activations that the delegate can fuse, in the forms that the lowering writes."""


def _admit_integers(
    config: type[GenericNodePartitionerConfig], *, fuses: bool
) -> type[GenericNodePartitionerConfig]:
    """A setting of ExecuTorch's that also takes its operator between dq and q."""

    class IntegerConfig(config):  # type: ignore[misc]  # executorch ships no types
        def __init__(self, **kwargs: bool) -> None:
            super().__init__(**kwargs)
            if fuses:
                self.fused_acts = list(_FUSED)

        def supported_precision_types(self) -> list[ConfigPrecisionType]:
            return [ConfigPrecisionType.FP32, ConfigPrecisionType.STATIC_QUANT]

        def get_node_and_deps(
            self, node: torch.fx.Node, ep: ExportedProgram
        ) -> list[torch.fx.Node]:
            """The nodes that the delegate takes with a node; none where it stays float."""
            if why_beyond_scales(node, config.target_name) or reads_scalar(node):
                return [node]
            found: list[torch.fx.Node] = super().get_node_and_deps(node, ep)
            return found

    IntegerConfig.__name__ = f"Integer{config.__name__}"
    return IntegerConfig


class WeightOnlyLinearConfig(LinearConfig):  # type: ignore[misc]  # executorch ships no types
    """ExecuTorch's setting for linears that also takes float activations with integer weights.

    XNNPACK has the kernels (f32-qc8w, f32-qc4w); ExecuTorch's setting looks for a dq at the
    input as soon as there is one at the weight.
    """

    def get_deps(
        self, node: torch.fx.Node, ep: ExportedProgram
    ) -> tuple[bool, list[torch.fx.Node]]:
        """Return True if the delegate takes a linear, and the nodes that it takes with it."""
        x, weight = node.all_input_nodes[:2]
        if is_dequant(weight) and not is_dequant(x):
            # A bias has been put into an add behind it: the serializer takes none here.
            return len(node.args) == 2, [weight, *weight.all_input_nodes]
        found: tuple[bool, list[torch.fx.Node]] = super().get_deps(node, ep)
        return found


class JoinsOneTwiceConfig(CatConfig):  # type: ignore[misc]  # executorch ships no types
    """ExecuTorch's setting for joins that also takes those of a tensor with itself.

    ExecuTorch (1.4) asks for two nodes that a join reads, and the delegate for two inputs.
    """

    def check_constraints(self, node: torch.fx.Node, ep: ExportedProgram) -> bool:
        """True if the delegate takes a join."""
        return bool(self.check_common_constraints(node, ep)) and len(node.args[0]) >= 2  # type: ignore[arg-type]


class ResizesAnyBatchConfig(UpsampleBilinear2dConfig):  # type: ignore[misc]  # no types
    """ExecuTorch's setting for bilinear resizes that also takes any number of images.

    The payload holds the height and the width of the result. ExecuTorch (1.4) asks for a fixed
    batch as well, and its own operator takes several times as long as XNNPACK's.
    """

    def check_constraints(self, node: torch.fx.Node, ep: ExportedProgram) -> bool:
        """True if the delegate takes a resize."""
        return has_known_image(node) and bool(self.check_common_constraints(node, ep))


class PoolsAnyBatchConfig(MaxPool2dConfig):  # type: ignore[misc]  # executorch ships no types
    """ExecuTorch's setting for max pools that rounds sizes up for any number of images.

    The payload has the padding that this takes, which the height and the width decide.
    """

    def check_constraints(self, node: torch.fx.Node, ep: ExportedProgram) -> bool:
        """True if the delegate takes a pool."""
        kernel, stride, is_ceil = (_argument(node, at, default) for at, default in _POOL_ARGUMENTS)
        if is_ceil and not has_known_image(node.all_input_nodes[0]):
            return False
        is_near = all(step <= size for step, size in zip(stride, kernel, strict=True))
        return is_near and bool(self.check_common_constraints(node, ep))


_POOL_ARGUMENTS = ((1, ()), (2, ()), (5, False))
"""Kernel, stride and whether sizes are rounded up: positions and defaults."""

_PACKS = (GEMMConfig, BatchNormConfig, PreluConfig)
"""Settings of the operators whose weights XNNPACK packs when it is loaded."""

_OURS = {
    LinearConfig: WeightOnlyLinearConfig,
    CatConfig: JoinsOneTwiceConfig,
    MaxPool2dConfig: PoolsAnyBatchConfig,
    SliceCopyConfig: AnyBatchSliceConfig,
    UpsampleBilinear2dConfig: ResizesAnyBatchConfig,
}
"""Settings of ExecuTorch's, and what takes their place."""


class OutsideControlFlow(XnnpackPartitioner):  # type: ignore[misc]  # executorch ships no types
    """ExecuTorch's partitioner, which leaves operators inside control flow to be decomposed.

    Theirs keeps whole what the delegate might take, finds inside a body that it does not, because
    a weight is an operand there, and lowering fails.
    """

    def ops_to_not_decompose(
        self, ep: ExportedProgram
    ) -> tuple[list[torch._ops.OpOverload], Callable[[torch.fx.Node], bool]]:
        """The operators that are kept whole, and which of their calls are."""
        operators, keeps = super().ops_to_not_decompose(ep)
        return operators, lambda node: node.graph is ep.graph and bool(keeps(node))


def _restrict(config: type[XNNPartitionerConfig]) -> type[XNNPartitionerConfig]:
    """A setting of ExecuTorch's without the calls that the delegate runs wrongly, or not at all.

    ExecuTorch (1.4) also marks the q/dq around a convolution as part of it before it declines
    the convolution: the delegate then has integers where the program reads floats.
    """

    class RestrictedConfig(config):  # type: ignore[misc]  # executorch ships no types
        def check_constraints(self, node: torch.fx.Node, ep: ExportedProgram) -> bool:
            """True if the delegate takes a node."""
            if not delegate_runs(node, config.target_name) or _is_left(node, config):
                return False
            if issubclass(config, _PACKS) and _packs_what_is_written(self, node, ep):
                return False
            unmarked = [n for n in _near(node) if not is_tagged_as_implicit_q_dq(n)]
            takes = bool(super().check_constraints(node, ep))
            if not takes:
                for other in unmarked:
                    other.meta.pop(IS_IMPLICIT_Q_DQ_TAG, None)
            return takes

        def get_node_and_deps(
            self, node: torch.fx.Node, ep: ExportedProgram
        ) -> list[torch.fx.Node]:
            """The nodes that the delegate takes with a node; none where a refusal left it float."""
            if fallback_of(node) and issubclass(config, GenericNodePartitionerConfig):
                return [node]
            found: list[torch.fx.Node] = super().get_node_and_deps(node, ep)
            return found

    RestrictedConfig.__name__ = config.__name__
    return RestrictedConfig


def _is_left(node: torch.fx.Node, config: type[XNNPartitionerConfig]) -> bool:
    """True if a refusal left a node to ExecuTorch's own kernels."""
    fallback = fallback_of(node)
    if fallback is Fallback.FLOAT and issubclass(config, GEMMConfig):
        # Its weight is computed, or it would have been folded.
        return any(is_dequant(n) for n in node.all_input_nodes[1:])
    return fallback is Fallback.PLAIN


def _packs_what_is_written(
    config: XNNPartitionerConfig, node: torch.fx.Node, ep: ExportedProgram
) -> bool:
    """True if a weight or bias is a buffer that calls write.

    The delegate packs weights when it is loaded. ExecuTorch (1.4) takes every buffer for a
    constant and hands over one that is written as an input: the kernel then has no weight, and
    the process crashes.
    """
    signature = ep.graph_signature
    written = set(signature.buffers_to_mutate.values())
    others = [n for n in node.all_input_nodes if n is not node.args[getattr(config, "act_idx", 0)]]
    sources = [n.all_input_nodes[0] if is_dequant(n) else n for n in others]
    return any(signature.inputs_to_buffers.get(n.name) in written for n in sources)


def _near(node: torch.fx.Node) -> set[torch.fx.Node]:
    """The neighbours of a node in the graph, at most two steps away."""
    sources, readers = list(node.all_input_nodes), list(node.users)
    further = (n for source in sources for n in source.all_input_nodes)
    return {*sources, *further, *readers, *(n for reader in readers for n in reader.users)}


def make_partitioner(integer: Iterable[str], fusing: Iterable[str]) -> XnnpackPartitioner:
    """ExecuTorch's partitioner with more operators in integers.

    Args:
        integer: edge operators to take in integers, for example "sigmoid.default".
        fusing: those of them that a following relu or hardtanh is fused into.
    """
    wanted, fused = set(integer), set(fusing)
    configs = []
    for config in (_OURS.get(c, c) for c in (*ALL_PARTITIONER_CONFIGS, EluConfig)):
        if config.target_name in wanted and issubclass(config, GenericNodePartitionerConfig):
            config = _admit_integers(config, fuses=config.target_name in fused)
        configs.append(_restrict(config))
    return OutsideControlFlow(configs=configs)


_MOST_DIMENSIONS = 6
"""XNN_MAX_TENSOR_DIMS."""


def delegate_runs(node: Node, name: str) -> bool:
    """True if the delegate computes a call right.

    Args:
        node: of the edge program, or of the ATen program before it.
        name: the operator as ExecuTorch's partitioner names it, for example "elu.default".
    """
    holds = _HOLDS.get(name)
    return _has_few_dimensions(node) and (holds is None or holds(node))


def reads_scalar(node: Node) -> bool:
    """True if a node reads a value without dimensions that is computed or an input.

    ExecuTorch (1.4) fails on the q/dq of one that is an input, looking for its layout; those of
    constants it takes.
    """
    return any(not _has_dimensions(n) for n in node.all_input_nodes if n.op == "call_function")


def _has_few_dimensions(node: Node) -> bool:
    values = [n.meta.get("val") for n in (node, *node.all_input_nodes)]
    return all(v.dim() <= _MOST_DIMENSIONS for v in values if isinstance(v, Tensor))


def _argument(node: Node, index: int, default: Any) -> Any:
    return node.args[index] if len(node.args) > index else default


def _elu(node: Node) -> bool:
    """The payload has no field for `scale` and `input_scale`; XNNPACK takes a positive alpha."""
    alpha, scale, input_scale = (_argument(node, index, 1) for index in (1, 2, 3))
    return bool(alpha > 0 and scale == 1 and input_scale == 1)


def _has_dimensions(node: Node) -> bool:
    """True if a value has dimensions, or is a constant behind at most a dequantize."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or value.dim() > 0:
        return True
    return node.op != "call_function" or all(
        n.op != "call_function" and not n.meta["val"].is_floating_point()
        for n in node.all_input_nodes[:1]
    )


def _is_image(node: Node) -> bool:
    return bool(node.meta["val"].dim() == 4)


def _has_one_dynamic_size(node: Node) -> bool:
    """The delegate's reshape takes no more."""
    return sum(not isinstance(size, int) for size in node.meta["val"].shape) <= 1


def _has_known_window(node: Node) -> bool:
    """The delegate pools along one of the last two dimensions, and keeps it, by a known size."""
    dim, keeps = node.args[1], _argument(node, 2, False)
    value = node.all_input_nodes[0].meta["val"]
    return bool(dim in (2, 3) and keeps and isinstance(value.shape[dim], int))


def _averages_what_it_reads(node: Node) -> bool:
    """The payload has no field for a divisor: windows at the border count fewer elements."""
    stride, padding, divisor = (_argument(node, index, None) for index in (2, 3, 6))
    return _is_image(node) and bool(stride) and (divisor is None or not any(padding or ()))


def _pads_with_a_number(node: Node) -> bool:
    """The payload is written as JSON first, which has no infinities."""
    return math.isfinite(_argument(node, 2, 0) or 0)


def _resizes_by_sizes(node: Node) -> bool:
    """The delegate divides the sizes; ATen takes the scales given, unless corners are aligned."""
    scales = _argument(node, 3, None)
    if scales is None or node.args[2]:
        return True
    before = node.all_input_nodes[0].meta["val"].shape[-2:]
    after = node.meta["val"].shape[-2:]
    return all(i * scale == o for i, scale, o in zip(before, scales, after, strict=True))


_HOLDS: Mapping[str, Callable[[Node], bool]] = {
    "avg_pool2d.default": _averages_what_it_reads,
    "constant_pad_nd.default": _pads_with_a_number,
    "dequantize_per_tensor.default": _has_dimensions,
    "elu.default": _elu,
    "max.dim": _has_known_window,
    "max_pool2d.default": _is_image,
    "prelu.default": _is_image,
    "quantize_per_tensor.default": _has_dimensions,
    "unsqueeze_copy.default": _has_one_dynamic_size,
    "upsample_bilinear2d.vec": _resizes_by_sizes,
}
