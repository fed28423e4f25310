"""pt2e-quant quantize: a .pt2 program and calibration data in, an artifact out."""

import ast
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from torch.export import ExportedProgram
from torch.fx import GraphModule

from pt2e_quant.backends.artifact import Artifact
from pt2e_quant.backends.registry import get
from pt2e_quant.backends.target.backend import Backend
from pt2e_quant.command_line.data_file import read_data
from pt2e_quant.command_line.make_batches import make_batches
from pt2e_quant.command_line.number_options import read_max_sizes
from pt2e_quant.command_line.program_file import load_program
from pt2e_quant.command_line.result_file import artifact_path
from pt2e_quant.core.effort import Effort
from pt2e_quant.core.errors import ConfigError
from pt2e_quant.core.max_sizes import limit_graph
from pt2e_quant.core.provenance import RecordKind
from pt2e_quant.core.read_capture import rebuild_capture
from pt2e_quant.core.unlift import graph_module_of
from pt2e_quant.flow.calibrate.calibrate_by_block import run_calibration
from pt2e_quant.flow.calibrate.pick_inputs import InputPick
from pt2e_quant.flow.calibrate.sample import sample_of
from pt2e_quant.flow.convert.convert_pt2e import convert_pt2e
from pt2e_quant.flow.prepare.prepare_pt2e import prepare_pt2e
from pt2e_quant.flow.report.worst_tensors import warn_if_low
from pt2e_quant.one_call import asking_for_data


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeOptions:
    """The arguments of the command.

    Args:
        model: the .pt2 file.
        backend: name of the backend.
        recipe: name of its recipe.
        calibration_data: a data file, or module:function; None for recipes that need none.
        output: the artifact's file; the model's name with the backend's suffix by default.
        inputs: keys or indices of what the model takes of each batch that a function gives.
        algorithms: names of what is to be done to weights and ranges besides.
        search: how the scales of weights are found; the recipe's own by default.
        effort: how much is tried out to choose the ranges of activations; None as the recipe says.
        resume: a folder for the state of a calibration block by block.
        batch_size: of arrays whose first dimension is dynamic.
        max_batches: calibrate with so many at most.
        keep_float: names of modules that stay float: globs, or regexes after "re:".
        pad_groups: pad linears whose weights the recipe's groups do not divide.
        max_sizes: largest sizes of dynamic dimensions, "x:0=64" each.
        strict: make errors of what the report would warn of.
        verify: run the artifact against the quantized graph, here and in a new process.
        validate: compare the graph behind every pass of the lowering, and name one that changes it.
        margin_db: how near it must be.
        measure: time the artifact against the float program, here.
        record: how much the file keeps of how each tensor was quantized; None: what is small.
        allow_unmeasured: use kernels that were not measured on the GPU at hand.
        allow_slower: quantize also what measured slower than float on such a machine.
    """

    model: Path
    backend: str
    recipe: str
    calibration_data: str | None = None
    output: Path | None = None
    inputs: Sequence[str] = ()
    algorithms: Sequence[str] = ()
    search: str | None = None
    effort: Effort | None = None
    resume: Path | None = None
    batch_size: int | None = None
    max_batches: int | None = None
    keep_float: Sequence[str] = ()
    pad_groups: bool = False
    max_sizes: Sequence[str] = ()
    strict: bool = True
    verify: bool = True
    validate: bool = False
    margin_db: float = 6.0
    record: RecordKind | None = None
    measure: bool = False
    allow_unmeasured: bool = False
    allow_slower: bool = False


def quantize_file(options: QuantizeOptions, console: Console) -> tuple[Artifact, Path]:
    """Quantize, lower and write.

    Args:
        options: what to do.
        console: where progress goes; a quiet one shows none.

    Returns:
        The artifact and the file it was written to.

    Raises:
        Pt2eQuantError: naming what is wrong, and the fix; nothing is written then.
    """
    backend = _backend(options)
    backend.require_extra()
    quantizer = backend.quantizer(options.recipe)
    for name in options.keep_float:
        quantizer.set_module_name(name, None)
    for name in options.algorithms:
        quantizer.add_algorithm(name)
    if options.search is not None:
        quantizer.with_search(options.search)
    if options.pad_groups:
        quantizer.pad_groups()
    output = artifact_path(options.output, options.model, backend)
    with _step(console, f"reading {options.model}"):
        program = load_program(options.model)
        batches = _read_batches(options, program, console)
    with _step(console, "preparing"):
        prepared = prepare_pt2e(program, quantizer, effort=options.effort, strict=options.strict)
    if options.max_sizes:
        limit_graph(prepared, read_max_sizes(options.max_sizes))
    # No step around these: they show progress bars of their own, and a terminal has room for one.
    pick, progress = read_pick(options.inputs), not console.quiet
    prepared = run_calibration(prepared, batches, options.resume, inputs=pick, progress=progress)
    quantized = _convert(prepared, options, progress=progress)
    with _step(console, f"lowering to {backend.name}"):
        artifact = backend.lower(
            quantized,
            strict=options.strict,
            verify="process" if options.verify else False,
            validate=options.validate,
            margin_db=options.margin_db,
            record=options.record,
            measure=options.measure,
        )
    warn_if_low(quantized, sample_of(quantized), artifact.report.sqnr_float_db)
    artifact.save(output)
    return artifact, output


def _backend(options: QuantizeOptions) -> Backend:
    found = get(options.backend)
    if options.allow_unmeasured:
        found = _allowing_unmeasured(found)
    return found.allowing_slower() if options.allow_slower else found


def _allowing_unmeasured(backend: Backend) -> Backend:
    allowing: Callable[[], Backend] | None = getattr(backend, "allowing_unmeasured", None)
    if allowing is None:
        raise ConfigError(
            f'backend "{backend.name}" has no unmeasured kernels to allow',
            fix="leave out --allow-unmeasured",
        )
    return allowing()


_ARGUMENT = re.compile(r"inputs=(\[.*?\]|'.*?'|\d+)")


def as_option(fix: str | None) -> str:
    """A fix that names `inputs=` as the option --pick, a key or an index each.

    >>> as_option("inputs=['ids', 'mask']: the rest of the batch is no input of the model")
    '--pick ids --pick mask: the rest of the batch is no input of the model'
    """

    def shown(match: re.Match[str]) -> str:
        value = ast.literal_eval(match[1])
        return " ".join(f"--pick {key}" for key in (value if isinstance(value, list) else [value]))

    return _ARGUMENT.sub(shown, fix or "").replace("inputs=", "--pick")


def read_pick(inputs: Sequence[str]) -> InputPick | None:
    """Keys and indices as `calibrate` takes them: one alone is the only input."""
    parts: list[str | int] = [int(i) if i.isdecimal() else i for i in inputs]
    if not parts:
        return None
    return parts[0] if len(parts) == 1 else parts


def _convert(prepared: GraphModule, options: QuantizeOptions, *, progress: bool) -> GraphModule:
    is_given = options.calibration_data is not None or bool(options.algorithms)
    with asking_for_data(options.recipe, "--calibration-data data.npz", is_given=is_given):
        return convert_pt2e(prepared, progress=progress)


def _read_batches(
    options: QuantizeOptions, program: ExportedProgram, console: Console
) -> Iterable[Any] | None:
    """The batches to calibrate with; None if no data is given."""
    if options.calibration_data is None:
        return None
    data = read_data(options.calibration_data)
    capture = rebuild_capture(graph_module_of(program))
    found = make_batches(
        data, capture, batch_size=options.batch_size, max_batches=options.max_batches
    )
    if found.unused:
        console.print(f"not used: {', '.join(found.unused)} of {data.label}")
    return found.batches


@contextmanager
def _step(console: Console, text: str) -> Iterator[None]:
    """A spinner while it lasts, a line with the time when it is done."""
    begin = time.perf_counter()
    with console.status(text):
        yield
    console.print(f"{text}: {time.perf_counter() - begin:.1f} s")
