"""From a target to its facts: compile, disassemble, count."""

from benchmarks.kernels.ahead_of_time.compile_kernel import compile_kernel
from benchmarks.kernels.ahead_of_time.disassemble import disassemble
from benchmarks.kernels.ahead_of_time.facts import KernelFacts, kernel_facts
from benchmarks.kernels.ahead_of_time.generations import GENERATIONS
from benchmarks.kernels.ahead_of_time.matrix import Target

__all__ = ["examine"]


def examine(target: Target) -> KernelFacts:
    """The static facts of one compilation.

    Raises:
        ConfigError: the compiler refuses it.
    """
    compiled = compile_kernel(target.case, target.tiles, target.capability)
    return kernel_facts(
        target.case,
        target.tiles,
        compiled,
        disassemble(compiled.cubin),
        GENERATIONS[target.capability],
    )
