"""The state of a block-wise calibration in a folder, from which it can be resumed."""

import hashlib
import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.fx import GraphModule

from pt2e_quant.core.errors import ArtifactError
from pt2e_quant.core.whole_file import whole_file
from pt2e_quant.flow.archive.layout import bytes_of, reported
from pt2e_quant.flow.archive.program import describe, rebuild, write_archive
from pt2e_quant.flow.archive.read_files import read_archive

_INDEX = "state.json"
_MODEL = "model"
"""The source of tensors that are as the model has them."""


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of a run.

    Args:
        blocks: that are done.
        ends: the names of the nodes that blocks end with.
    """

    blocks: int
    ends: tuple[str, ...]


class BlockState:
    """Files of one run: `state.json`, and a file of tensors for each block that is done.

    A block's file holds the tensors that are new with it and the graph as it was then. Tensors
    that the model has, and those of earlier blocks, are named and not stored again. All files are
    written whole or not at all, `state.json` after the block's.

    Args:
        folder: made if it is missing.
        prepared: as the run begins with it.
        calls: the calibration data.

    Raises:
        ArtifactError: the folder holds the state of another run, or cannot be used.
        UnsupportedError: a file cannot hold the graph.
    """

    def __init__(self, folder: Path, prepared: GraphModule, calls: Sequence[Sequence[Any]]) -> None:
        self.folder = folder
        program, tensors = describe(prepared)
        self._model = tensors
        self._sources = {_key(t): [_MODEL, name] for name, t in tensors.items()}
        self._held = list(tensors.values())  # no other tensor takes their places meanwhile
        self._fingerprint = _fingerprint(program, tensors, calls)
        self.progress = self._found()

    def _found(self) -> Progress | None:
        with reported(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            path = self.folder / _INDEX
            if not path.is_file():
                return None
            text = path.read_text(encoding="utf-8")
        index: Any = None
        with suppress(ValueError):
            index = json.loads(text)
        if not isinstance(index, dict) or index.get("fingerprint") != self._fingerprint:
            raise ArtifactError(
                f"{self.folder} holds the state of another run: of another model, other data, or "
                "other settings",
                fix="name an empty folder, or delete this one",
            )
        return Progress(blocks=index["blocks"], ends=tuple(index["ends"]))

    def graph(self, progress: Progress) -> GraphModule:
        """The graph as it was after the last block that is done.

        Raises:
            ArtifactError: a file is missing or damaged.
        """
        files: dict[str, dict[str, Tensor]] = {_MODEL: self._model}
        latest: Any = None
        for number in range(progress.blocks):
            contents = read_archive(self._file(number))
            files[_name(number)], latest = dict(contents.tensors), contents.program
        tensors = {}
        for name, (file, key) in latest["sources"].items():
            tensors[name] = files[file][key]
            self._sources[_key(tensors[name])] = [file, key]
        self._held += tensors.values()
        return rebuild(latest["graph"], tensors)

    def save(self, gm: GraphModule, progress: Progress) -> None:
        """Write what is new with the block that was done last, then that it is done.

        Raises:
            ArtifactError: the folder cannot be written.
        """
        program, tensors = describe(gm)
        number, new, sources = progress.blocks - 1, {}, {}
        for name, tensor in tensors.items():
            known = self._sources.get(_key(tensor))
            if known is None:
                known = [_name(number), name]
                new[name] = tensor
                self._held.append(tensor)
                self._sources[_key(tensor)] = known
            sources[name] = known
        write_archive(self._file(number), {"graph": program, "sources": sources}, new, None)
        index = {**asdict(progress), "fingerprint": self._fingerprint}
        with reported(self.folder), whole_file(self.folder / _INDEX) as stream:
            stream.write(json.dumps(index).encode())

    def _file(self, number: int) -> Path:
        return self.folder / f"{_name(number)}.safetensors"


def _name(number: int) -> str:
    return f"block-{number:05d}"


def _key(tensor: Tensor) -> tuple[Any, ...]:
    """A key that is equal for one tensor as long as it is not written into."""
    place = tensor.untyped_storage().data_ptr() or id(tensor), tensor.storage_offset()
    return *place, tuple(tensor.shape), tensor.dtype, tensor._version


def _fingerprint(
    program: dict[str, Any], tensors: dict[str, Tensor], calls: Sequence[Sequence[Any]]
) -> str:
    """A digest of the graph with its settings, its tensors and the data."""
    found = hashlib.sha256(json.dumps(program, sort_keys=True).encode())
    leaves = [leaf for call in calls for leaf in call]
    for value in (*tensors.values(), *leaves):
        found.update(bytes_of(value) if isinstance(value, Tensor) else repr(value).encode())
    return found.hexdigest()
