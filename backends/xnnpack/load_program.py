"""Programs in ExecuTorch's runtime, with every kernel that the lowering may use."""

# Registers quantized_decomposed::embedding_byte and its like; nothing of the module is used.
import executorch.kernels.quantized  # noqa: F401
from executorch.runtime import Program, Runtime

__all__ = ["load_program"]


def load_program(pte: bytes) -> Program:
    """A program to load methods of; keep it as long as its methods.

    Raises:
        RuntimeError: it is damaged or no ExecuTorch program.
    """
    return Runtime.get().load_program(pte)
