"""Loading a program that was compiled ahead of time, with its weights on cache lines."""

import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO
from zipfile import BadZipFile, ZipFile

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pt2e_quant.core.errors import ArtifactError

__all__ = ["align_weights", "load_compiled"]

_CACHE_LINE = 64


def load_compiled(source: str | Path | BinaryIO) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """Load a .pt2 that `CpuArtifact.compile` wrote. It holds machine code: load whom you trust.

    `torch._inductor.aoti_load_package` loads it as well. There, constants lie where malloc puts
    them, 16 bytes off a cache line more often than not, and each load of oneDNN's matrix kernels
    then touches two lines. Here packed weights that lie so are copied, and their first places stay
    allocated.

    Args:
        source: the file, or a stream of its bytes.

    Returns:
        A call on the leaves of the program's inputs that gives the leaves of its results.

    Raises:
        ArtifactError: the file is missing or no compiled program.
    """
    try:
        # The library stays mapped once it is loaded, without its file.
        with (
            tempfile.TemporaryDirectory(prefix="pt2e_quant_") as folder,
            ZipFile(source) as package,
        ):
            # What the library calls through torch's dispatcher is listed in a file beside it.
            package.extractall(folder)
            (library,) = Path(folder).rglob("*.so")
            runner = torch._C._aoti.AOTIModelContainerRunnerCpu(str(library), 1)
    except (OSError, BadZipFile, ValueError) as error:
        raise ArtifactError(
            f'cannot read "{source}" as a compiled program: {error}',
            fix="write it with artifact.compile(path)",
        ) from error
    align_weights(runner)
    return _call_of(runner)


def align_weights(runner: torch._C._aoti.AOTIModelContainerRunnerCpu) -> None:
    """Give packed weights that start inside a cache line storage of oneDNN's own.

    Scalars of several operators go by one name each, so that constants are exchanged one by one
    and not as a whole.
    """
    users = Counter(runner.get_constant_names_to_original_fqns().values())
    aligned = {
        name: constant.clone()
        for name, constant in runner.extract_constants_map(False).items()
        if constant.is_mkldnn
        and users[name] == 1
        and torch.ops.mkldnn.data_ptr(constant) % _CACHE_LINE
    }
    if aligned:
        runner.update_constant_buffer(
            aligned, use_inactive=False, validate_full_updates=False, user_managed=True
        )


def _call_of(
    runner: torch._C._aoti.AOTIModelContainerRunnerCpu,
) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """The loaded program on leaves: torch's own face takes the call's pytree apart once more."""

    def call(leaves: Sequence[Any]) -> Sequence[Any]:
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        found: list[Any] = pytree.tree_leaves(
            runner.run(tensors), is_leaf=lambda value: value is None
        )
        return found

    return call
