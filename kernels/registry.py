"""The registry: every kernel of this package, by device, and what others add to it."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from pt2e_quant.core.errors import ConfigError
from pt2e_quant.graph.op_table import OpTable
from pt2e_quant.kernels.a8w4_linear.op import KERNELS as A8W4_LINEAR
from pt2e_quant.kernels.data_movement.cpu import KERNELS as DATA_MOVEMENT_CPU
from pt2e_quant.kernels.data_movement.entries import KERNELS as DATA_MOVEMENT
from pt2e_quant.kernels.embedding_gather.op import KERNELS as EMBEDDING_GATHER
from pt2e_quant.kernels.fp8_linear.op import KERNELS as FP8_LINEAR
from pt2e_quant.kernels.int4_linear.cpu import KERNELS as INT4_LINEAR_CPU
from pt2e_quant.kernels.int4_linear.op import KERNELS as INT4_LINEAR
from pt2e_quant.kernels.int8_add.op import KERNELS as INT8_ADD
from pt2e_quant.kernels.int8_cat.op import KERNELS as INT8_CAT
from pt2e_quant.kernels.int8_conv2d.cpu import KERNELS as INT8_CONV2D_CPU
from pt2e_quant.kernels.int8_conv2d.op import KERNELS as INT8_CONV2D
from pt2e_quant.kernels.int8_linear.cpu import KERNELS as INT8_LINEAR_CPU
from pt2e_quant.kernels.int8_linear.op import KERNELS as INT8_LINEAR
from pt2e_quant.kernels.int8_matmul.op import KERNELS as INT8_MATMUL
from pt2e_quant.kernels.int8_pool.op import KERNELS as INT8_POOL
from pt2e_quant.kernels.kernel import Device, Kernel
from pt2e_quant.kernels.norm_quantize.op import KERNELS as NORM_QUANTIZE
from pt2e_quant.kernels.quantize.op import KERNELS as QUANTIZE
from pt2e_quant.kernels.recurrent_layer.cpu import KERNELS as RECURRENT_LAYER_CPU
from pt2e_quant.kernels.softmax_quantize.op import KERNELS as SOFTMAX_QUANTIZE

KERNELS: tuple[Kernel, ...] = (
    *INT8_LINEAR,
    *INT4_LINEAR,
    *A8W4_LINEAR,
    *FP8_LINEAR,
    *INT8_CONV2D,
    *INT8_MATMUL,
    *DATA_MOVEMENT,
    *INT8_ADD,
    *QUANTIZE,
    *NORM_QUANTIZE,
    *SOFTMAX_QUANTIZE,
    *EMBEDDING_GATHER,
    *INT8_CAT,
    *INT8_POOL,
    *INT8_CONV2D_CPU,
    *INT8_LINEAR_CPU,
    *INT4_LINEAR_CPU,
    *DATA_MOVEMENT_CPU,
    *RECURRENT_LAYER_CPU,
)


@dataclass(frozen=True, slots=True)
class Registry:
    """Kernels of one device.

    Raises:
        ConfigError: a kernel of another device, or two of one name.
    """

    device: Device
    kernels: tuple[Kernel, ...]

    def __post_init__(self) -> None:
        strangers = [k.name for k in self.kernels if k.device is not self.device]
        if strangers:
            raise ConfigError(f"kernels {strangers} are not for {self.device}")
        names = [k.name for k in self.kernels]
        if twice := sorted({n for n in names if names.count(n) > 1}):
            raise ConfigError(
                f"two kernels are named {twice}",
                fix="give a kernel of your own its own row name",
            )

    @classmethod
    def of(cls, device: Device, kernels: Iterable[Kernel] = KERNELS) -> "Registry":
        """A registry of the `kernels` that run on a device."""
        return cls(device, tuple(k for k in kernels if k.device is device))

    def with_kernels(self, *kernels: Kernel) -> "Registry":
        """This registry and kernels of a user's own; the wider pattern wins, as in any table."""
        return Registry(self.device, (*self.kernels, *kernels))

    def kernel(self, name: str) -> Kernel:
        """The kernel of a row's name.

        Raises:
            ConfigError: there is none.
        """
        for kernel in self.kernels:
            if kernel.name == name:
                return kernel
        raise ConfigError(f'{self.device} has no kernel "{name}"')

    def table(self, backend: str, reasons: Mapping[str, str]) -> OpTable:
        """The op table of a backend that runs these kernels.

        Args:
            backend: its name as people write it.
            reasons: operator name to why it has no row.
        """
        return OpTable(backend=backend, rows=tuple(k.row for k in self.kernels), reasons=reasons)

    def __iter__(self) -> Iterator[Kernel]:
        return iter(self.kernels)
