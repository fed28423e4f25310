"""Ahead-of-time compilation of a fused program by torch's Inductor."""

import contextlib
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.export import ExportedProgram
from torch.fx import Graph
from torch.utils import _pytree as pytree

from pt2e_quant.core.errors import ArtifactError, UnsupportedError
from pt2e_quant.kernels.onednn.operators import ConvSum, QConvSum, aten

__all__ = ["compile_program"]

_SUMMAND = 6


class SumsInPlace(CustomGraphPass):
    """Sums write into their summand, which Inductor sees and orders reads before.

    Its own fusions do the same, at the same point of its pipeline: before it, a graph must not
    write. A summand that is read later is copied.
    """

    def __call__(self, graph: Graph) -> None:
        """Edit the graph that Inductor is about to generate code for."""
        order = {node: i for i, node in enumerate(graph.nodes)}
        for node in list(graph.nodes):
            if node.target is not ConvSum:
                continue
            summand = node.args[_SUMMAND]
            readers = [order.get(reader, -1) for reader in summand.users]
            is_own = summand.op == "call_function" and not _is_view(summand)
            if not is_own or max(readers) > order[node] or node.args.count(summand) > 1:
                with graph.inserting_before(node):
                    copied = graph.call_function(aten.clone.default, (summand,))
                copied.meta.update(summand.meta)
                node.args = (*node.args[:_SUMMAND], copied, *node.args[_SUMMAND + 1 :])
            node.target = QConvSum

    def uuid(self) -> str:
        """What Inductor's cache of compiled graphs knows the pass by."""
        return "pt2e_quant.sums_in_place.1"


def _is_view(node: Any) -> bool:
    schema = getattr(node.target, "_schema", None)
    returns = schema.returns if schema is not None else ()
    return any(result.alias_info is not None for result in returns)


def compile_program(
    program: ExportedProgram, path: str | Path | None
) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """Compile a program into a .pt2 file and load it.

    Args:
        program: what to compile; constants are frozen into it, weights packed.
        path: where the file goes; None for a temporary one that lasts as long as the result.

    Returns:
        A call on the leaves of the program's inputs that gives the leaves of its results.

    Raises:
        UnsupportedError: this machine has no C++ compiler.
        ArtifactError: the path cannot be written.
    """
    if not any(shutil.which(name) for name in ("g++", "c++", "clang++", "cl")):
        raise UnsupportedError(
            "compile() needs a C++ compiler, and finds none on the PATH",
            fix="install g++ or clang, or run the artifact as it is",
        )
    settings = {"freezing": True, "post_grad_custom_post_pass": SumsInPlace()}
    with _target(path) as target:
        package = torch._inductor.aoti_compile_and_package(
            program, package_path=str(target), inductor_configs=settings
        )
        model = torch._inductor.aoti_load_package(package)
    return _call_of(model)


@contextlib.contextmanager
def _target(path: str | Path | None) -> Iterator[Path]:
    """Where the package goes; a temporary one is deleted once it is loaded."""
    if path is None:
        with tempfile.TemporaryDirectory(prefix="pt2e_quant_") as folder:
            yield Path(folder) / "program.pt2"
        return
    target = Path(path)
    if target.suffix != ".pt2" or not target.parent.is_dir():
        raise ArtifactError(
            f'cannot write a compiled program to "{path}"',
            fix="give a path that ends in .pt2, in a folder that exists",
        )
    yield target


def _call_of(model: Any) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """The loaded program on leaves: torch's own face takes the call's pytree apart once more."""
    run = model.loader.run

    def call(leaves: Sequence[Any]) -> Sequence[Any]:
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        found: list[Any] = pytree.tree_leaves(run(tensors), is_leaf=lambda value: value is None)
        return found

    return call
