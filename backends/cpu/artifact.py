"""A quantized program as a torch module of oneDNN's fused operators."""

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from pt2e_quant.backends.artifact import write_artifact
from pt2e_quant.backends.cpu.compile_program import compile_program
from pt2e_quant.backends.cpu.load_compiled import load_compiled
from pt2e_quant.backends.module_artifact import ModuleArtifact
from pt2e_quant.backends.profile import Profiled
from pt2e_quant.core.capture import Capture
from pt2e_quant.core.errors import ArtifactError, UnsupportedError
from pt2e_quant.flow.reexport import export_again
from pt2e_quant.flow.report import Report
from pt2e_quant.kernels.int8_linear.op import Int8Linear
from pt2e_quant.kernels.int8_linear.rows_op import Int8LinearRows

__all__ = ["CpuArtifact"]

_AT_RUN_TIME = (Int8Linear, Int8LinearRows)


class CpuArtifact(ModuleArtifact):
    """Fused operators on weights packed for this machine.

    Args:
        program: the fused graph on plain integers, which any tool of torch takes.
        module: the same on packed weights; call it as the float module.
        data: the bytes that `save` writes.
        capture: the call it was captured with.
        report: what became of every tensor.
    """

    def __init__(
        self,
        program: GraphModule,
        module: GraphModule,
        data: bytes,
        capture: Capture,
        report: Report,
    ) -> None:
        super().__init__(module, data, capture, report)
        self.program = program
        self.check: Callable[[CpuArtifact], None] | None = None
        """What the lowering checked it with, for `compile` to check again; None if it did not."""
        self._compiled: Callable[[Sequence[Any]], Sequence[Any]] | None = None

    def run_leaves(self, leaves: Sequence[Any]) -> Sequence[Any]:
        """Run on the call's leaves; buffers that a call writes keep their values.

        While a profiler of torch runs, each fused operator is in a range of its own.
        """
        if self._compiled is not None:
            return self._compiled(leaves)
        is_watched = torch._C._autograd._profiler_enabled()
        call: Callable[..., Any] = Profiled(self.module).run if is_watched else self.module
        with torch.no_grad():
            result = call(*self.capture.positional(leaves))
        found: list[Any] = pytree.tree_leaves(result, is_leaf=lambda value: value is None)
        return found

    def compile(self, path: str | Path | None = None) -> "CpuArtifact":
        """Compile the whole program ahead of time: what is left in float is fused as well.

        `run` then calls the compiled program, once it has passed the check that `lower` made. It
        needs a C++ compiler, and takes from seconds to a minute.

        Args:
            path: where to leave the compiled program, a .pt2 that runs without this package and
                without a compiler (`torch._inductor.aoti_load_package`, or `load_compiled` of
                `pt2e_quant.backends.cpu.load_compiled`, which is faster); nowhere by default.

        Returns:
            The artifact itself.

        Raises:
            UnsupportedError: the program writes buffers, it quantizes activations at run time, or
                this machine has no C++ compiler.
            ArtifactError: the path cannot be written, or the compiled program fails the check.
        """
        if self.capture.mutated_buffers:
            raise UnsupportedError(
                "a compiled program would keep the buffers that it writes "
                f"({', '.join(self.capture.mutated_buffers[:3])}) to itself, and reset() could "
                "not restore them",
                fix="run it as it is, or pass the state as an input",
            )
        rows = next((n for n in self.program.graph.nodes if n.target in _AT_RUN_TIME), None)
        if rows is not None:
            raise UnsupportedError(
                "torch's ahead-of-time compiler does not load an operator of Python with a dtype "
                "among its arguments",
                node=rows,
                fix='run it as it is, or quantize with recipe "int8", which compiles',
            )
        if path is not None and Path(path).suffix != ".pt2":
            raise ArtifactError(
                f'cannot write a compiled program to "{path}"', fix="give a path that ends in .pt2"
            )
        data = compile_program(self.exported_program())
        self._compiled = load_compiled(io.BytesIO(data))
        try:
            if self.check is not None:
                self.check(self)
            if path is not None:
                write_artifact(path, data)
        except ArtifactError:
            self._compiled = None
            raise
        return self

    def exported_program(self) -> ExportedProgram:
        """The fused program with the captured dynamic shapes, for torch.export.save and Inductor.

        Its weights are plain integers; packing them is part of the program, and folded away by
        whoever freezes it. It runs where `pt2e_quant` is imported.
        """
        return export_again(self.program)
