"""ExecuTorch's lowering with one trace of the decompositions instead of three.

ExecuTorch 1.4 traces a program three times before it makes an edge program of it: to
functionalize it, to decompose all but what a partitioner keeps whole, and to decompose what the
partitioner then lets go of. The second trace functionalizes too, and where nothing is left to
decompose, the third one gives the graph that it is given. Inside `decompose_once` the first is
left out, and the third where no operator has a decomposition.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import executorch.exir.program._program as program_module
from torch.export import ExportedProgram
from torch.fx import GraphModule

from pt2e_quant.accelerate.patch import Patch, Replacement, replaced

PATCH = Patch(
    name="single_decomposition",
    saves="a third of the time of lowering to a .pte",
    versions={"torch": "2.13", "executorch": "1.4"},
)


def decompose_once() -> AbstractContextManager[None]:
    """Leave out traces that change nothing while the block runs; a second thread waits."""
    return replaced(PATCH, _replacements)


def _replacements() -> list[Replacement]:
    decompose = ExportedProgram.run_decompositions
    generate = program_module._gen_edge_manager_for_partitioners
    given: list[ExportedProgram] = []
    traced: list[tuple[ExportedProgram, set[str]]] = []

    def run_decompositions(
        self: ExportedProgram, decomp_table: Mapping[Any, Any] | None = None, **options: Any
    ) -> ExportedProgram:
        is_given = any(self is program for program in given)
        # Torch's own tables are dicts whose entries are elsewhere: equal to an empty one.
        if is_given and decomp_table is not None and len(decomp_table) == 0:
            return self  # the next trace makes it functional
        for program, keys in traced:
            if self is program and decomp_table is not None and not _decomposes(self, decomp_table):
                _keep_meta(self, keys)
                return self
        result: ExportedProgram = decompose(self, decomp_table, **options)
        if is_given:
            traced.append((result, {key for node in result.graph.nodes for key in node.meta}))
        return result

    def generate_edge_manager(
        partitioner: Any, aten_programs: Mapping[str, ExportedProgram], *args: Any, **kwargs: Any
    ) -> Any:
        given.extend(aten_programs.values())
        try:
            return generate(partitioner, aten_programs, *args, **kwargs)
        finally:
            given.clear()
            traced.clear()

    return [
        (ExportedProgram, "run_decompositions", run_decompositions),
        (program_module, "_gen_edge_manager_for_partitioners", generate_edge_manager),
    ]


def _decomposes(program: ExportedProgram, table: Mapping[Any, Any]) -> bool:
    """True if a table has an operator of a program, or of a body of its control flow."""
    graphs = (m.graph for m in program.graph_module.modules() if isinstance(m, GraphModule))
    return any(node.target in table for graph in graphs for node in graph.nodes)


def _keep_meta(program: ExportedProgram, keys: set[str]) -> None:
    """Take away what a partitioner marked nodes with since they were traced, as a trace does."""
    for node in program.graph.nodes:
        for key in node.meta.keys() - keys:
            del node.meta[key]
