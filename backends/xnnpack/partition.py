"""The partitioner: which operators ExecuTorch hands to the delegate in integers.

ExecuTorch's own settings take few operators in int8, though its XNNPACK runtime computes many
more. The settings are classes that a partitioner is given, so the operators that have a row in
the table get a setting that admits integers. All others keep ExecuTorch's.
"""

from collections.abc import Callable, Iterable

import torch.fx
from executorch.backends.xnnpack.partition.config import ALL_PARTITIONER_CONFIGS
from executorch.backends.xnnpack.partition.config.gemm_configs import GEMMConfig, LinearConfig
from executorch.backends.xnnpack.partition.config.generic_node_configs import (
    EluConfig,
    GenericNodePartitionerConfig,
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
from torch.export import ExportedProgram

from pt2e_quant.backends.target.float_retries import Leave, leave_of
from pt2e_quant.backends.xnnpack.delegate_limits import delegate_runs, reads_scalar
from pt2e_quant.backends.xnnpack.passes.scale_limits import why_beyond_scales

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
            """What the delegate takes with a node: nothing, where it stays float."""
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
        """Whether the delegate takes a linear, and the nodes that it takes with it."""
        x, weight = node.all_input_nodes[:2]
        if is_dequant(weight) and not is_dequant(x):
            # A bias has been put into an add behind it: the serializer takes none here.
            return len(node.args) == 2, [weight, *weight.all_input_nodes]
        found: tuple[bool, list[torch.fx.Node]] = super().get_deps(node, ep)
        return found


_PACKS = (GEMMConfig, BatchNormConfig, PreluConfig)
"""Settings of the operators whose weights XNNPACK packs when it is loaded."""

_OURS = {LinearConfig: WeightOnlyLinearConfig}
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
            """Whether the delegate takes a node."""
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
            """What the delegate takes with a node: nothing, where a refusal left it in float."""
            if leave_of(node) and issubclass(config, GenericNodePartitionerConfig):
                return [node]
            found: list[torch.fx.Node] = super().get_node_and_deps(node, ep)
            return found

    RestrictedConfig.__name__ = config.__name__
    return RestrictedConfig


def _is_left(node: torch.fx.Node, config: type[XNNPartitionerConfig]) -> bool:
    """Whether a refusal left a node to ExecuTorch's own kernels."""
    leave = leave_of(node)
    if leave is Leave.INTEGERS and issubclass(config, GEMMConfig):
        # Its weight is computed, or it would have been folded.
        return any(is_dequant(n) for n in node.all_input_nodes[1:])
    return leave is Leave.DELEGATE


def _packs_what_is_written(
    config: XNNPartitionerConfig, node: torch.fx.Node, ep: ExportedProgram
) -> bool:
    """Whether a weight or bias is a buffer that calls write.

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
    """What a node reads and what reads it, two steps away at most."""
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
