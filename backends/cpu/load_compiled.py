"""Loading a program that was compiled ahead of time, with its weights on cache lines."""

import json
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO
from zipfile import BadZipFile, ZipFile

import torch
from torch import Tensor

from pt2e_quant.core.errors import ArtifactError

WRITTEN_BUFFERS = "pt2e_quant.written_buffers"
"""The key of a package's metadata with the names of buffers that a call writes, as JSON."""
_CACHE_LINE = 64

Runner = torch._C._aoti.AOTIModelContainerRunnerCpu


class CompiledProgram:
    """A loaded program: a call on the leaves of its inputs gives the leaves of its results.

    What a call writes into buffers, a cache for instance, the next call finds there.

    Args:
        runner: torch's own, of the program's library.
        buffers: names of those that a call writes.
    """

    def __init__(self, runner: Runner, buffers: Sequence[str] = ()) -> None:
        self._runner = runner
        constants = runner.extract_constants_map(False) if buffers else {}
        self.written = [constants[name] for name in buffers]
        """The program's own memory, not copies."""
        self._initial = [value.clone() for value in self.written]

    def __call__(self, leaves: Sequence[Any]) -> Sequence[Any]:
        """Run; torch's own face takes the call's pytree apart once more."""
        found: list[Any] = self._runner.run([leaf for leaf in leaves if isinstance(leaf, Tensor)])
        return found

    def reset(self) -> None:
        """Forget what earlier calls wrote into buffers."""
        for value, initial in zip(self.written, self._initial, strict=True):
            value.copy_(initial)


def load_compiled(source: str | Path | BinaryIO) -> CompiledProgram:
    """Load a .pt2 that `CpuArtifact.compile` wrote. It holds machine code: load whom you trust.

    `torch._inductor.aoti_load_package` loads it as well. There, constants lie where malloc puts
    them, 16 bytes off a cache line more often than not, and each load of oneDNN's matrix kernels
    then touches two lines. Here packed weights that lie so are copied, and their first places stay
    allocated. Nor does torch's own know how to forget what calls wrote into buffers.

    Args:
        source: the file, or a stream of its bytes.

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
            metadata = json.loads(library.with_name(f"{library.stem}_metadata.json").read_text())
            runner = Runner(str(library), 1)
            align_weights(runner)
            return CompiledProgram(runner, json.loads(metadata.get(WRITTEN_BUFFERS, "[]")))
    except (OSError, BadZipFile, ValueError, KeyError) as error:
        raise ArtifactError(
            f'cannot read "{source}" as a compiled program: {error}',
            fix="write it with artifact.compile(path)",
        ) from error


def align_weights(runner: Runner) -> None:
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
