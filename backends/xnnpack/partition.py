"""The partitioner: which operators ExecuTorch hands to the delegate in integers.

ExecuTorch's own settings take few operators in int8, though its XNNPACK runtime computes many
more. The settings are classes that a partitioner is given, so the operators that have a row in
the table get a setting that admits integers. All others keep ExecuTorch's.
"""

from collections.abc import Iterable

from executorch.backends.xnnpack.partition.config import ALL_PARTITIONER_CONFIGS
from executorch.backends.xnnpack.partition.config.generic_node_configs import (
    EluConfig,
    GenericNodePartitionerConfig,
)
from executorch.backends.xnnpack.partition.config.xnnpack_config import ConfigPrecisionType
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner

__all__ = ["make_partitioner"]

_FUSED = ("relu.default", "hardtanh.default")
"""The activations that the delegate can fuse, once spelled as the lowering spells them."""


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

    IntegerConfig.__name__ = f"Integer{config.__name__}"
    return IntegerConfig


def make_partitioner(integer: Iterable[str], fusing: Iterable[str]) -> XnnpackPartitioner:
    """ExecuTorch's partitioner with more operators in integers.

    Args:
        integer: edge operators to take in integers, for example "sigmoid.default".
        fusing: those of them that a following relu or hardtanh is fused into.
    """
    wanted, fused = set(integer), set(fusing)
    configs = []
    for config in (*ALL_PARTITIONER_CONFIGS, EluConfig):
        if config.target_name in wanted and issubclass(config, GenericNodePartitionerConfig):
            config = _admit_integers(config, fuses=config.target_name in fused)
        configs.append(config)
    return XnnpackPartitioner(configs=configs)
