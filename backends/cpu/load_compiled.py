"""Programs compiled ahead of time by torch's Inductor: made, and loaded on cache lines."""

import json
import shutil
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO
from zipfile import BadZipFile, ZipFile

import torch
from torch import Tensor
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.export import ExportedProgram
from torch.fx import Graph, Node

from pt2e_quant.backends.cpu.passes.module_passes import write_out
from pt2e_quant.core.errors import ArtifactError, UnsupportedError
from pt2e_quant.core.qdq import QuantizePerTensor
from pt2e_quant.kernels.onednn.operators import ConvSum, LinearSum, QConvSum, QLinear, aten

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


_SUMMAND, _UNARY = 6, 15


class SumsForInductor(CustomGraphPass):
    """Sums in the forms that Inductor compiles best, put in after its own fusions.

    A convolution's writes into its summand, which Inductor sees and orders reads before; a summand
    that is read later is copied. A linear's becomes an add, which is fused with what follows:
    oneDNN's costs more, and torch 2.13 leaks a handle of its summand in every call (its C++
    wrapper writes the argument out twice and frees one).
    """

    def __call__(self, graph: Graph) -> None:
        """Edit the graph that Inductor is about to generate code for."""
        order = {node: i for i, node in enumerate(graph.nodes)}
        for node in list(graph.nodes):
            if node.target is ConvSum:
                _write_summand(graph, node, order)
            elif node.target is LinearSum:
                _add_summand(graph, node)

    def uuid(self) -> str:
        """The key of the pass in Inductor's cache of compiled graphs."""
        return "pt2e_quant.sums_for_inductor.1"


def _write_summand(graph: Graph, node: Node, order: Mapping[Node, int]) -> None:
    summand: Any = node.args[_SUMMAND]
    readers = [order.get(reader, -1) for reader in summand.users]
    is_own = summand.op == "call_function" and not _is_view(summand)
    if not is_own or max(readers) > order[node] or node.args.count(summand) > 1:
        with graph.inserting_before(node):
            copied = graph.call_function(aten.clone.default, (summand,))
        copied.meta.update(summand.meta)
        node.args = (*node.args[:_SUMMAND], copied, *node.args[_SUMMAND + 1 :])
    node.target = QConvSum


def _is_view(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    returns = schema.returns if schema is not None else ()
    return any(result.alias_info is not None for result in returns)


def _add_summand(graph: Graph, node: Node) -> None:
    """qlinear(x, …) + summand, then perhaps relu, then perhaps a quantize."""
    scale, zero_point, dtype = node.args[8:11]
    real = node.meta["val"].to(torch.float32)

    def call(target: Any, *args: Any, value: Any = real) -> Node:
        made = graph.call_function(target, args)
        made.meta.update(node.meta)
        made.meta["val"] = value
        return made

    with graph.inserting_before(node):
        head = (*node.args[:_SUMMAND], node.args[_SUMMAND + 1])
        made = call(QLinear, *head, 1.0, 0, torch.float32, "none", [], "")
        made = call(aten.add.Tensor, made, node.args[_SUMMAND])
        if node.args[_UNARY] == "relu":
            made = call(aten.relu.default, made)
        if dtype is torch.uint8:
            limits = 0, 255, dtype
            value = node.meta["val"]
            made = call(QuantizePerTensor, made, scale, zero_point, *limits, value=value)
    node.replace_all_uses_with(made)
    graph.erase_node(node)


def compile_program(program: ExportedProgram, buffers: Sequence[str] = ()) -> bytes:
    """Compile a program into the bytes of a .pt2, which `load_compiled` reads.

    Args:
        program: what to compile; constants are frozen into it, weights packed.
        buffers: dotted names of those that a call writes, for `load_compiled` to restore.

    Raises:
        UnsupportedError: this machine has no C++ compiler, or an operator of this package has no
            form in torch's own.
    """
    if not any(shutil.which(name) for name in ("g++", "c++", "clang++", "cl")):
        raise UnsupportedError(
            "compile() needs a C++ compiler, and finds none on the PATH",
            fix="install g++ or clang, or run the artifact as it is",
        )
    settings = {
        "freezing": True,
        "post_grad_custom_post_pass": SumsForInductor(),
        "aot_inductor.metadata": {WRITTEN_BUFFERS: json.dumps([*buffers])},
    }
    with tempfile.TemporaryDirectory(prefix="pt2e_quant_") as folder:
        target = Path(folder) / "program.pt2"
        with torch.no_grad():  # Inductor freezes constants only where no gradient is asked for.
            torch._inductor.aoti_compile_and_package(
                write_out(program, buffers), package_path=str(target), inductor_configs=settings
            )
        return target.read_bytes()
