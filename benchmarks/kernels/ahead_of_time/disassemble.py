"""A cubin as instructions, by the tools that come with Triton; finding the loop that matters."""

import re
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from pt2e_quant.core.errors import MissingExtraError

__all__ = ["Disassembly", "Instruction", "disassemble", "main_loop", "read_listing"]

_LINE = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)([^;]*);", re.M)
_TARGET = re.compile(r"0x([0-9a-f]+)\s*$")
_USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")
_MATRIX = re.compile(r"(?:[IHQDO]G?MMA|UTC\w*MMA)(?:\.|$)")
_WIDTHS = {"256": 32, "128": 16, "64": 8, "U16": 2, "S16": 2, "U8": 1, "S8": 1}
_GLOBAL_LOADS = ("LDG", "LDGSTS", "UTMALDG", "UBLKCP")


@dataclass(frozen=True, slots=True)
class Instruction:
    """One machine instruction.

    Args:
        address: its place in the kernel, in bytes.
        opcode: with its suffixes: "LDGSTS.E.BYPASS.128".
        target: where a branch goes.
    """

    address: int
    opcode: str
    target: int | None = None

    @property
    def name(self) -> str:
        """The opcode without suffixes."""
        return self.opcode.partition(".")[0]

    @property
    def is_matrix(self) -> bool:
        """Whether it multiplies matrices."""
        return _MATRIX.match(self.opcode) is not None

    @property
    def is_global_load(self) -> bool:
        """Whether it reads global memory, into registers or shared memory."""
        return self.name in _GLOBAL_LOADS

    @property
    def loaded_bytes(self) -> int:
        """What a load takes of a thread; 16 for a copy of a whole tile."""
        if self.name in _GLOBAL_LOADS[2:]:
            return 16
        return next((_WIDTHS[s] for s in self.opcode.split(".") if s in _WIDTHS), 4)

    @property
    def is_wide(self) -> bool:
        """Whether a load takes 16 bytes a thread or more."""
        return self.loaded_bytes >= 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Disassembly:
    """A kernel's instructions and what it asks for.

    Args:
        instructions: in order.
        registers: of one thread.
        local_bytes: of one thread's stack: spilled registers lie there.
        shared_bytes: known when it was compiled; a launch may ask for more.
    """

    instructions: Sequence[Instruction]
    registers: int
    local_bytes: int
    shared_bytes: int


def disassemble(cubin: bytes) -> Disassembly:
    """Read a binary with cuobjdump.

    Raises:
        MissingExtraError: Triton comes without its NVIDIA tools.
    """
    tool = _cuobjdump()
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        listing, usage = (
            subprocess.run(
                [tool, option, file.name], capture_output=True, text=True, check=True
            ).stdout
            for option in ("-sass", "-res-usage")
        )
    found = _USAGE.search(usage)
    assert found is not None, f"cuobjdump -res-usage says: {usage}"
    registers, stack, shared, local = (int(number) for number in found.groups())
    return Disassembly(
        instructions=read_listing(listing),
        registers=registers,
        local_bytes=stack + local,
        shared_bytes=shared,
    )


def _cuobjdump() -> Path:
    found = find_spec("triton")
    for folder in () if found is None else found.submodule_search_locations or ():
        tool = Path(folder) / "backends" / "nvidia" / "bin" / "cuobjdump"
        if tool.exists():
            return tool
    raise MissingExtraError("cuda", "triton with cuobjdump, as its Linux wheel has it")


def read_listing(listing: str) -> list[Instruction]:
    """The instructions in the text of `cuobjdump -sass`.

    >>> read_listing("  /*0010*/  @!P4 BRA 0x10 ;  /* 0x0 */")
    [Instruction(address=16, opcode='BRA', target=16)]
    """
    found = []
    for address, opcode, operands in _LINE.findall(listing):
        target = _TARGET.search(operands) if opcode.startswith("BRA") else None
        found.append(Instruction(int(address, 16), opcode, int(target[1], 16) if target else None))
    return found


def main_loop(instructions: Sequence[Instruction]) -> Sequence[Instruction]:
    """The innermost loop with the most matrix instructions, else with the most global loads.

    Everything but padding, where a kernel has no such loop.
    """
    numbers = {instruction.address: n for n, instruction in enumerate(instructions)}
    spans = [
        (numbers[branch.target], n)
        for n, branch in enumerate(instructions)
        if branch.target is not None and branch.target < branch.address
    ]

    def work(span: tuple[int, int]) -> tuple[int, int]:
        body = instructions[span[0] : span[1] + 1]
        return sum(i.is_matrix for i in body), sum(i.is_global_load for i in body)

    for kind in (0, 1):
        busy = [span for span in spans if work(span)[kind]]
        inner = [s for s in busy if not any(o != s and s[0] <= o[0] and o[1] <= s[1] for o in busy)]
        if inner:
            begin, end = max(inner, key=work)
            return instructions[begin : end + 1]
    return [i for i in instructions if i.name != "NOP"]
