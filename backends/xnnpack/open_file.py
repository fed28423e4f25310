"""Any `.pte`, also one without our metadata, opened to be run: what benchmarks compare with."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from executorch.extension.pybindings import portable_lib

from pt2e_quant.backends.xnnpack.load_program import load_program
from pt2e_quant.core.errors import ArtifactError

__all__ = ["open_file"]


def open_file(path: Path, *, threads: int) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """A function that runs the file's `forward` on the leaves of a call.

    Args:
        path: of the `.pte`.
        threads: of ExecuTorch's pool, which the whole process shares.

    Raises:
        ArtifactError: the file is damaged or no ExecuTorch program.
    """
    portable_lib._unsafe_reset_threadpool(threads)
    try:
        # The bytes, not the path: the runtime maps a path, and a file replaced later would crash.
        program = load_program(path.read_bytes())
        method = program.load_method("forward")
    except (OSError, RuntimeError) as error:
        raise ArtifactError(
            f"{path} is damaged or no ExecuTorch program: {error}", fix="give a .pte file"
        ) from error

    def run(leaves: Sequence[Any], keep: object = program) -> Sequence[Any]:
        # A method does not keep its program alive, and crashes without it.
        takes_all = method.metadata.num_inputs() == len(leaves)
        inputs = [leaf for leaf in leaves if takes_all or leaf is not None]
        results: Sequence[Any] = method.execute(inputs)
        return results

    return run
