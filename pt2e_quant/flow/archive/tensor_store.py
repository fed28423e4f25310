"""Tensors to named blocks of memory and back; sharing, ties and strides are kept."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pt2e_quant.core.errors import ArtifactError


@dataclass(slots=True)
class _Block:
    """One storage, and the tensors that were added of it by number."""

    name: str
    members: dict[int, Tensor]


class TensorWriter:
    """Numbers tensors; equal views of one storage have one number."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[Any, ...], int] = {}
        self._blocks: dict[tuple[Any, ...], _Block] = {}
        self._names: set[str] = set()

    def add(self, tensor: Tensor, name: str) -> int:
        """The number of a tensor; `name` is what its block is called if it is the first of it."""
        tensor = tensor.detach()
        # An empty tensor has no storage to share.
        storage = tensor.untyped_storage().data_ptr() or id(tensor)
        place = storage, str(tensor.device)
        layout = tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype
        key = (*place, *layout)
        if key not in self._numbers:
            self._numbers[key] = len(self._numbers)
            if place not in self._blocks:
                self._blocks[place] = _Block(self._free(name), {})
            self._blocks[place].members[self._numbers[key]] = tensor
        return self._numbers[key]

    def finish(self) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
        """The table of tensors by number, and the blocks by name."""
        entries: dict[int, dict[str, Any]] = {}
        blocks: dict[str, Tensor] = {}
        for block in self._blocks.values():
            blocks[block.name], first = _flat(list(block.members.values()))
            for number, tensor in block.members.items():
                entries[number] = _entry(block.name, tensor, blocks[block.name], first)
        return [entries[number] for number in sorted(entries)], blocks

    def _free(self, name: str) -> str:
        unique, count = name, 1
        while unique in self._names:
            unique, count = f"{name}.{count}", count + 1
        self._names.add(unique)
        return unique


def _flat(members: Sequence[Tensor]) -> tuple[Tensor, int]:
    """The block that holds all tensors of a storage, and the byte of the storage it begins at."""
    only = members[0]
    if len(members) == 1 and only.is_contiguous():
        return only, int(only.storage_offset()) * only.element_size()
    used = [_span(t) for t in members]
    first, last = min(a for a, _ in used), max(b for _, b in used)
    if len(members) == 1 and last - first > 2 * only.numel() * only.element_size():
        return only.contiguous(), 0
    storage = only.untyped_storage()
    whole = torch.empty(0, dtype=torch.uint8, device=only.device).set_(storage)
    return whole[first:last], first


def _span(tensor: Tensor) -> tuple[int, int]:
    """The bytes of its storage that a tensor uses, from and to."""
    size = tensor.element_size()
    first = int(tensor.storage_offset())
    last = first + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return first * size, (last if tensor.numel() else first) * size


def _entry(block: str, tensor: Tensor, held: Tensor, first: int) -> dict[str, Any]:
    entry: dict[str, Any] = {"block": block, "device": str(tensor.device)}
    if held.dtype == tensor.dtype and held.shape == tensor.shape and held.is_contiguous():
        return entry
    return entry | {
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
        "stride": list(tensor.stride()),
        "byte": tensor.storage_offset() * tensor.element_size() - first,
    }


class TensorReader:
    """Tensors by number, each made once.

    Args:
        entries: the table that `TensorWriter.finish` gave.
        blocks: the blocks by name, on the CPU.
    """

    def __init__(self, entries: Sequence[Mapping[str, Any]], blocks: Mapping[str, Tensor]) -> None:
        self._entries = entries
        self._blocks = dict(blocks)
        self._moved: dict[tuple[str, str], Tensor] = {}
        self._made: dict[int, Tensor] = {}

    def get(self, number: int) -> Tensor:
        """The tensor of a number.

        Raises:
            ArtifactError: its device is not on this machine.
        """
        if number not in self._made:
            self._made[number] = self._make(self._entries[number])
        return self._made[number]

    def _make(self, entry: Mapping[str, Any]) -> Tensor:
        block = self._on_device(str(entry["block"]), str(entry["device"]))
        if "shape" not in entry:
            return block
        dtype = getattr(torch, entry["dtype"])
        shape, stride, first = tuple(entry["shape"]), tuple(entry["stride"]), int(entry["byte"])
        storage = block.untyped_storage()
        offset = int(block.storage_offset()) * block.element_size() + first
        if offset % dtype.itemsize:
            # A mapped block may begin anywhere.
            self._moved[str(entry["block"]), str(entry["device"])] = block.clone()
            return self._make(entry)
        # set_ checks that the view lies within the storage.
        made = torch.empty(0, dtype=dtype, device=block.device)
        return made.set_(storage, offset // made.element_size(), shape, stride)

    def _on_device(self, block: str, device: str) -> Tensor:
        key = block, device
        if key not in self._moved:
            try:
                self._moved[key] = self._blocks[block].to(device)
            except (RuntimeError, AssertionError) as error:
                raise ArtifactError(
                    f'this program holds tensors on "{device}", which is not on this machine',
                    fix="move the module to the CPU before it is saved",
                ) from error
        return self._moved[key]
