"""Loops over values of a dynamic size: ExecuTorch 1.4 copies them without resizing."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from executorch.exir.emit._emitter import EValue, Instruction, Int, KernelCall, _Emitter


@contextmanager
def resizing_loops() -> Iterator[None]:
    """While the block runs, loops are written with operators that resize their results.

    `_Emitter._emit_scan` writes `aten::copy_` for states and `et_copy_index` for what is kept of
    each step. Both leave the sizes that were planned, so that a smaller batch stops in them.
    `aten::copy.out` gives its result the size of its first argument; what is kept gets the size of
    the first state, with a step in front, before the loop. Of an out variant the result stands
    twice: as an argument, and as what is returned.

    Before:  copy_(state, next, False) -> state
    After:   unsqueeze_copy(state, 0, kept) -> kept; copy.out(next, next, False, state) -> state
    """
    original = _Emitter._emit_scan

    def emit_scan(self: Any, args: Any, outputs: Any) -> Any:
        _resize_kept(self, args[1], outputs)
        start = len(self.chain.instructions)
        found = original(self, args, outputs)
        index, _ = self._get_operator(name="aten::copy_")
        resizing, _ = self._get_operator(name="aten::copy", overload="out")
        for instruction in self.chain.instructions[start:]:
            call = instruction.instr_args
            if isinstance(call, KernelCall) and call.op_index == index:
                _, value, is_blocking, state = call.args
                call.op_index, call.args = resizing, [value, value, is_blocking, state, state]
        return found

    _Emitter._emit_scan = emit_scan
    try:
        yield
    finally:
        _Emitter._emit_scan = original


def _resize_kept(emitter: Any, states: Any, outputs: Any) -> None:
    """Give what is kept of each step the size of a step, where it is the first state."""
    first = states[0]
    for kept in outputs[len(states) :]:
        if list(kept.tensor.sizes[1:]) != list(first.tensor.sizes):
            continue
        index, _ = emitter._get_operator(name="aten::unsqueeze_copy", overload="out")
        axis = emitter._emit_evalue(EValue(Int(0)))
        arguments = [first.id, axis.id, kept.id, kept.id]
        call = Instruction(KernelCall(op_index=index, args=arguments))
        emitter.chain.instructions.append(call)
