"""What several units are timed beside: the same product in float, by cuBLAS and by Inductor."""

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.kernels.bench_case import Peer

__all__ = ["FloatLinear", "float_linear_peers"]

T = TypeVar("T")


class FloatLinear(NamedTuple):
    """A linear in any float dtype; peers cast it to theirs.

    Args:
        x: [M, K].
        weight: [N, K].
        bias: [N] or None.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None

    def cast(self, dtype: torch.dtype) -> "FloatLinear":
        """In another dtype."""
        bias = None if self.bias is None else self.bias.to(dtype)
        return FloatLinear(self.x.to(dtype), self.weight.to(dtype), bias)


def float_linear_peers(
    floats: Callable[[T], FloatLinear], after: Callable[[Tensor], Tensor] | None = None
) -> dict[str, Peer[T]]:
    """The float linear in cuBLAS (bf16, fp16) and through torch.compile (bf16).

    Args:
        floats: the operands of the same product, dequantized.
        after: what follows in the model, fused by the kernel: `F.relu`, `F.gelu`. cuBLAS runs it as
            a second launch, which is what the model would do.
    """

    def linear(operands: FloatLinear) -> Tensor:
        y = F.linear(*operands)
        return y if after is None else after(y)

    compiled = torch.compile(linear, dynamic=False)

    def prepared(
        run: Callable[[FloatLinear], Tensor], dtype: torch.dtype
    ) -> Callable[[T], Callable[[], object]]:
        def prepare(operands: T) -> Callable[[], object]:
            cast = floats(operands).cast(dtype)
            return lambda: run(cast)

        return prepare

    return {
        "cuBLAS bf16": Peer(prepare=prepared(linear, torch.bfloat16), is_float=True),
        "cuBLAS fp16": Peer(prepare=prepared(linear, torch.float16), is_float=True),
        "torch.compile bf16": Peer(prepare=prepared(compiled, torch.bfloat16), is_float=True),
    }
