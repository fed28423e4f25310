"""A quantized program as a torch module of oneDNN's fused operators, called without wrappers."""

import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import GraphModule
from torch.fx.graph import CodeGen
from torch.utils import _pytree as pytree

from pt2e_quant.backends.artifact import write_artifact
from pt2e_quant.backends.cpu.load_compiled import CompiledProgram, compile_program, load_compiled
from pt2e_quant.backends.module_artifact import ModuleArtifact
from pt2e_quant.backends.profile_module import Profiled
from pt2e_quant.core.capture import Capture
from pt2e_quant.core.errors import ArtifactError
from pt2e_quant.flow.reexport import export_again
from pt2e_quant.flow.report.report import Report
from pt2e_quant.graph.meta import attribute


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
        self._call = flat_call(module)
        self.check: Callable[[CpuArtifact], None] | None = None
        """The lowering's check, which `compile` repeats; None if there was none."""
        self._compiled: CompiledProgram | None = None

    def run_leaves(self, leaves: Sequence[Any]) -> Sequence[Any]:
        """Run on the call's leaves; buffers that a call writes keep their values.

        While a profiler of torch runs, each fused operator is in a range of its own.
        """
        if self._compiled is not None:
            return self._compiled(leaves)
        if not torch._C._autograd._profiler_enabled():
            return self._call(leaves)
        with torch.no_grad():
            result = Profiled(self.module).run(*self.capture.positional(leaves))
        found: list[Any] = pytree.tree_leaves(result, is_leaf=lambda value: value is None)
        return found

    def compile(self, path: str | Path | None = None) -> "CpuArtifact":
        """Compile the whole program ahead of time: what is left in float is fused as well.

        `run` then calls the compiled program, once it has passed the check that `lower` made. It
        needs a C++ compiler, and takes from seconds to a minute. Buffers that a call writes start
        again as they were at first, and `reset` restores them.

        Args:
            path: where to leave the compiled program, a .pt2 that runs without this package and
                without a compiler (`torch._inductor.aoti_load_package`, or `load_compiled` of
                `pt2e_quant.backends.cpu.load_compiled`, which is faster); nowhere by default.

        Returns:
            The artifact itself.

        Raises:
            UnsupportedError: this machine has no C++ compiler, or an operator of this package has
                no form in torch's own.
            ArtifactError: the path cannot be written, or the compiled program fails the check.
        """
        if path is not None and Path(path).suffix != ".pt2":
            raise ArtifactError(
                f'cannot write a compiled program to "{path}"', fix="give a path that ends in .pt2"
            )
        data = compile_program(self.exported_program(), self.capture.mutated_buffers)
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

    def reset(self) -> None:
        """Forget what earlier calls wrote into buffers."""
        super().reset()
        if self._compiled is not None:
            self._compiled.reset()

    def state(self) -> Mapping[str, Tensor]:
        """The buffers that calls write, of the program that `run` calls."""
        if self._compiled is None:
            return super().state()
        return dict(zip(self.capture.mutated_buffers, self._compiled.written, strict=True))

    def exported_program(self) -> ExportedProgram:
        """The fused program with the captured dynamic shapes, for torch.export.save and Inductor.

        Its weights are plain integers; packing them is part of the program, and folded away by
        whoever freezes it. Its operators are the backend's: `pq.backends.get("cpu")` registers them
        in a process that only loads it.
        """
        return export_again(self.program)


def flat_call(module: GraphModule) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """A module's computation, from its leaves in placeholder order to the leaves of its result.

    The module's own call takes the user's containers apart and puts them together again, and
    looks every constant up through the modules that hold it: a fifth of a call of a network of
    tiny layers. Here the constants are attributes of one object. They are the module's own
    tensors, so that what a call writes into a buffer is seen in the module.

    Args:
        module: is not changed.
    """
    names: dict[Any, Any] = {}
    graph = torch.fx.Graph()
    result: Any = graph.graph_copy(module.graph, names)
    graph.output(tuple(pytree.tree_leaves(result, is_leaf=lambda value: value is None)))
    graph.set_codegen(CodeGen())
    flat = GraphModule(torch.nn.Module(), torch.fx.Graph())
    for node in graph.nodes:
        if node.op in ("get_attr", "call_module"):
            held = attribute(module, node.target)
            node.target = f"held_{node.name}"
            # Not through Module.__setattr__: what is registered is looked up in three tables.
            flat.__dict__[node.target] = held
    flat.graph = graph
    # Opaque to torch.compile as the module is.
    forward = torch.compiler.disable(flat.forward)  # type: ignore[no-untyped-call]  # torch's own

    def call(leaves: Sequence[Any]) -> Sequence[Any]:
        if not torch.is_grad_enabled():
            return forward(*leaves)  # type: ignore[no-any-return]  # generated code
        # A tenth of the time of `with torch.no_grad()`, which counts beside a tiny network's.
        torch._C._set_grad_enabled(False)
        try:
            return forward(*leaves)  # type: ignore[no-any-return]
        finally:
            torch._C._set_grad_enabled(True)

    return call
