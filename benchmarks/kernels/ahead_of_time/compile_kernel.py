"""One kernel with one set of arguments and tiles to a cubin, for a GPU that need not be there."""

from collections.abc import Mapping
from importlib import import_module

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.errors import TritonError

from benchmarks.kernels.ahead_of_time.compiled import Compiled
from benchmarks.kernels.compile_case import CompileCase
from pt2e_quant.core.errors import ConfigError
from pt2e_quant.kernels.tiles import TileConfig

__all__ = ["compile_kernel", "triton_version"]


def triton_version() -> str:
    """Of the installed Triton, "3.7.1"."""
    return str(triton.__version__).partition("+")[0]


def compile_kernel(case: CompileCase, tiles: TileConfig, capability: int) -> Compiled:
    """Compile as a launch would.

    Args:
        case: the kernel and its arguments.
        tiles: its blocks, warps and stages.
        capability: 90 for sm_90.

    Raises:
        ConfigError: the case names other arguments than the kernel has, or the compiler refuses
            it, as it does tiles that are too small for a matrix instruction.
    """
    kernel = getattr(import_module(f"pt2e_quant.kernels.{case.op}.gpu"), case.kernel)
    own = case.constants_on.get(capability, {})
    constants = {**case.constants, **own, **dict(tiles.blocks)}
    signature = _signature(case, list(kernel.arg_names), constants)
    places = {name: number for number, name in enumerate(kernel.arg_names)}
    source = ASTSource(
        kernel,
        signature,
        constants,
        {(places[name],): [["tt.divisibility", 16]] for name in case.aligned if name in places},
    )
    try:
        compiled = triton.compile(
            source,
            target=GPUTarget("cuda", capability, 32),
            options={
                "num_warps": tiles.num_warps,
                "num_stages": tiles.num_stages,
                "enable_fp_fusion": case.fp_fusion,
            },
        )
    except (TritonError, RuntimeError, ValueError, AssertionError) as error:
        raise ConfigError(
            f"{case.name} does not compile for sm_{capability} with Triton {triton_version()} and "
            f"{tiles.options()}: {error}",
            fix="correct the row of its tile table",
        ) from error
    return Compiled(
        cubin=compiled.asm["cubin"],
        ttir=str(compiled.asm["ttir"]),
        shared_bytes=int(compiled.metadata.shared),
        warps=int(compiled.metadata.num_warps),
    )


def _signature(
    case: CompileCase, arguments: list[str], constants: Mapping[str, int | bool | str]
) -> dict[str, str]:
    """Argument name to type in the kernel's order."""
    described = case.signature.keys() | constants.keys()
    if described != set(arguments):
        missing, unknown = set(arguments) - described, described - set(arguments)
        raise ConfigError(
            f"{case.name} and its tiles leave out {sorted(missing)} of {case.kernel}'s arguments "
            f"and name {sorted(unknown)}, which it does not have"
        )
    return {n: "constexpr" if n in constants else case.signature[n] for n in arguments}
