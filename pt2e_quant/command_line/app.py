"""The commands and their options, as typer reads them."""

import json
import math
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from pt2e_quant.backends.registry import get, names
from pt2e_quant.backends.target.recipe import ALIASES
from pt2e_quant.command_line.data_file import import_modules, read_data
from pt2e_quant.command_line.fail_under import FailUnder, check_figure, check_report
from pt2e_quant.command_line.make_batches import make_batches
from pt2e_quant.command_line.number_options import finite, sizes
from pt2e_quant.command_line.open_model import open_model, open_reference
from pt2e_quant.command_line.print_output import (
    algorithms_table,
    print_json,
    recipes_table,
    results_table,
    timings_table,
)
from pt2e_quant.command_line.quantize_file import QuantizeOptions, quantize_file
from pt2e_quant.command_line.result_file import (
    check_writable,
    join_results,
    result_names,
    write_npz,
)
from pt2e_quant.command_line.time_models import noise_leaves, time_in_turn
from pt2e_quant.core.effort import Effort
from pt2e_quant.core.errors import ConfigError, InputError
from pt2e_quant.core.provenance import RecordKind
from pt2e_quant.flow.calibrate.pick_inputs import as_call
from pt2e_quant.flow.calibrate.sample import sqnr_db
from pt2e_quant.passes.algorithms.registry import OWN_NAMES, descriptions

app = typer.Typer(
    name="pt2e-quant",
    help="Quantize programs of torch.export, and look at, run and time the result.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        try:
            own = version("pt2e-quant")
        except PackageNotFoundError:  # run from a checkout
            own = "not installed"
        typer.echo(f"pt2e-quant {own}, torch {torch.__version__}")
        raise typer.Exit


@app.callback()
def main(
    show_version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show versions."),
    ] = False,
) -> None:
    """Options that stand before a command."""


File = Annotated[Path, typer.Argument(help="A .pte, .onnx or .pt2 file, or one of pq.save.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print errors only.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
BatchSize = Annotated[
    int | None, typer.Option(min=1, help="Samples a call, where the first dimension is dynamic.")
]
Imports = Annotated[
    list[str] | None,
    typer.Option(
        "--import",
        help="Import a module first, for the classes that a model returns; repeatable. "
        "transformers.modeling_outputs for Hugging Face models.",
        callback=lambda names: import_modules(names or ()),
    ),
]
DATA_HELP = (
    "A .npz, .safetensors or .pt with an array for each input, samples on the first axis; "
    "or module:function, which returns batches."
)


@app.command()
def quantize(
    model: Annotated[Path, typer.Argument(help="A .pt2 file of torch.export.save.")],
    backend: Annotated[
        str,
        typer.Option(
            help="Where it is to run: xnnpack, onnx, cpu, or cuda (experimental: not yet measured "
            "on a GPU)."
        ),
    ],
    calibration_data: Annotated[
        str | None,
        typer.Option(help=DATA_HELP + " Dynamic and weight-only recipes need none."),
    ] = None,
    recipe: Annotated[str, typer.Option(help="How to quantize; a recipe of the backend.")] = "int8",
    output: Annotated[Path | None, typer.Option("--output", "-o", help="File to write.")] = None,
    inputs: Annotated[
        list[str] | None,
        typer.Option(
            help="What the model takes of each batch of module:function, a key or an index; "
            "repeatable. --inputs 0 for batches of (images, labels)."
        ),
    ] = None,
    algorithm: Annotated[
        list[str] | None,
        typer.Option(help=f"What else to do to weights: {', '.join(OWN_NAMES)}; repeatable."),
    ] = None,
    search: Annotated[
        str | None, typer.Option(help="How scales of weights are found: min_max, mse, hqq.")
    ] = None,
    effort: Annotated[
        Effort | None,
        typer.Option(
            help="What to try out on calibration data for activations' ranges; balanced for static "
            "recipes."
        ),
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(
            help="Calibrate block by block and keep each in this folder: the same command goes on "
            "where it was stopped."
        ),
    ] = None,
    batch_size: BatchSize = None,
    max_batches: Annotated[int | None, typer.Option(min=1, help="Calibrate with so many.")] = None,
    keep_float: Annotated[
        list[str] | None,
        typer.Option(help='Leave these modules float: a name, a glob, or "re:…"; repeatable.'),
    ] = None,
    pad_groups: Annotated[
        bool,
        typer.Option("--pad-groups", help="Pad linears that the recipe's groups do not divide."),
    ] = False,
    max_sizes: Annotated[
        list[str] | None,
        typer.Option(
            help="The largest size of a dynamic dimension, input:dimension=size; repeatable. "
            "--max-sizes x:0=64 for a .pte whose export has no bound.",
            callback=sizes,
        ),
    ] = None,
    strict: Annotated[bool, typer.Option(help="Refuse what the report would warn of.")] = True,
    verify: Annotated[
        bool, typer.Option(help="Check the artifact by running it, also in a new process.")
    ] = True,
    validate: Annotated[
        bool,
        typer.Option("--validate", help="Compare the graph behind every pass of the lowering."),
    ] = False,
    margin_db: Annotated[
        float, typer.Option(help="How near it must be to its graph.", callback=finite)
    ] = 6.0,
    measure: Annotated[
        bool, typer.Option("--measure", help="Time it against the float program, on this machine.")
    ] = False,
    record: Annotated[
        RecordKind | None,
        typer.Option(help="What the file keeps of how each tensor was quantized."),
    ] = None,
    allow_unmeasured: Annotated[
        bool,
        typer.Option(
            "--allow-unmeasured", help="cuda: use kernels that were not measured on the GPU here."
        ),
    ] = False,
    allow_slower: Annotated[
        bool,
        typer.Option(
            "--allow-slower",
            help="cpu, cuda, onnx: integers also where they measured slower than float.",
        ),
    ] = False,
    report: Annotated[Path | None, typer.Option(help="Also write the report as JSON.")] = None,
    fail_under: FailUnder = None,
    quiet: Quiet = False,
    as_json: Json = False,
    imports: Imports = None,
) -> None:
    """Quantize a program and write it for a backend.

    --fail-under is of the SQNR of the quantized graph against the float model, in dB, on the first
    batch. The file is written either way.
    """
    if report is not None:
        check_writable(report)
    artifact, written = quantize_file(
        QuantizeOptions(
            model=model,
            backend=backend,
            recipe=recipe,
            calibration_data=calibration_data,
            output=output,
            inputs=inputs or (),
            algorithms=algorithm or (),
            search=search,
            effort=effort,
            resume=resume,
            batch_size=batch_size,
            max_batches=max_batches,
            keep_float=keep_float or (),
            pad_groups=pad_groups,
            max_sizes=max_sizes or (),
            strict=strict,
            verify=verify,
            validate=validate,
            margin_db=margin_db,
            record=record,
            measure=measure,
            allow_unmeasured=allow_unmeasured,
            allow_slower=allow_slower,
        ),
        Console(stderr=True, quiet=quiet),
    )
    if report is not None:
        report.write_text(artifact.report.to_json())
    if as_json:
        print_json("quantize", {**json.loads(artifact.report.to_json()), "file": str(written)})
    else:
        console = stdout(quiet)
        console.print(artifact.report.tables()[0])
        console.print(f"wrote {written} ({artifact.size_bytes:,} bytes)", soft_wrap=True)
        console.print(f"everything about it: pt2e-quant inspect {written}", soft_wrap=True)
    check_report(artifact.report, fail_under)


@app.command()
def recipes(
    backend: Annotated[str | None, typer.Argument(help="One backend; all by default.")] = None,
    as_json: Json = False,
) -> None:
    """List the recipes of the backends, and other names that they have."""
    found = [get(name) for name in ([backend] if backend else names())]
    if as_json:
        listed = {target.name: target.recipes for target in found}
        cautions = {target.name: target.caution for target in found if target.caution}
        texts = {"recipes": listed, "aliases": ALIASES, "cautions": cautions}
        print_json("recipes", texts)
        return
    console = stdout()
    for target in found:
        title = f"{target.name} ({target.caution})" if target.caution else target.name
        console.print(recipes_table(title, target.recipes))
    aliases = ", ".join(f"{alias} = {name}" for alias, name in ALIASES.items())
    console.print(f"other names: {aliases}", soft_wrap=True)


@app.command()
def algorithms(as_json: Json = False) -> None:
    """List the algorithms that --algorithm takes, in the order they run."""
    found = descriptions()
    if as_json:
        print_json("algorithms", {"algorithms": [asdict(row) for row in found]})
        return
    table = algorithms_table(found)
    stdout().print(table)


@app.command()
def run(
    file: File,
    inputs: Annotated[str, typer.Option(help=DATA_HELP)],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="An .npz for the results.")
    ] = None,
    batch_size: BatchSize = None,
    quiet: Quiet = False,
    as_json: Json = False,
    imports: Imports = None,
) -> None:
    """Run a file on data, batch by batch, and show or keep the results."""
    if output is not None:
        if output.suffix != ".npz":
            raise ConfigError(
                f"{output}: results go to an .npz file", fix=f"-o {output.with_suffix('.npz')}"
            )
        check_writable(output)
    model = open_model(file)
    batches = make_batches(read_data(inputs), model.capture, batch_size=batch_size).batches
    calls = [model.run_leaves(model.capture.bind(*as_call(batch))) for batch in batches]
    if not calls:
        raise InputError(f"{inputs} gives no batch", fix="give at least one sample")
    results = join_results(result_names(model.capture, calls[0]), calls)
    if output is not None:
        write_npz(output, results)
    if as_json:
        shapes = {name: [*tensor.shape] for name, tensor in results.items()}
        print_json("run", {"calls": len(calls), "shapes": shapes, "file": output and str(output)})
        return
    console = stdout(quiet)
    console.print(results_table(results))
    console.print(f"{len(calls)} calls" + (f", wrote {output}" if output is not None else ""))


@app.command()
def bench(
    file: Annotated[Path, typer.Argument(help="A .pte, .onnx or .pt2 file of this package.")],
    against: Annotated[Path, typer.Option(help="The float model: .pt2, .pte or .onnx.")],
    inputs: Annotated[str | None, typer.Option(help=DATA_HELP + " Noise by default.")] = None,
    batch_size: BatchSize = None,
    threads: Annotated[int, typer.Option(min=1, help="Threads of each runtime.")] = 1,
    rounds: Annotated[int, typer.Option(min=1, help="Timed calls of each model.")] = 50,
    fail_under: FailUnder = None,
    as_json: Json = False,
    imports: Imports = None,
) -> None:
    """Time a file against the float model: called in turn, median and minimum.

    --fail-under is of the ratio of the medians: how many times as fast the file is.
    """
    if file == against:
        raise ConfigError(f"{file} against itself says nothing", fix="--against the float model")
    capture = open_model(file).capture
    leaves: list[Any] = noise_leaves(capture)
    if inputs is not None:
        batches = make_batches(read_data(inputs), capture, batch_size=batch_size).batches
        leaves = capture.bind(*as_call(next(iter(batches))))
    paths = {str(file): file, str(against): against}
    runs = {k: open_reference(path, capture, threads=threads) for k, path in paths.items()}
    results = [_tensors(run(leaves)) for run in runs.values()]
    ratio = sqnr_db(results[-1], results[0])
    sizes = {label: path.stat().st_size for label, path in paths.items()}
    timings = time_in_turn(runs, leaves, rounds=rounds, sizes=sizes)
    speed_up = timings[str(against)].median_us / timings[str(file)].median_us
    if as_json:
        files = {label: asdict(timing) for label, timing in timings.items()}
        facts: dict[str, float | None] = {
            "threads": threads,
            "rounds": rounds,
            "speed_up": speed_up,
        }
        # Between results of noise a distance says nothing about the model's own data.
        facts["sqnr_db"] = ratio if inputs is not None and math.isfinite(ratio) else None
        print_json("bench", {"files": files, **facts})
    else:
        console = stdout()
        console.print(timings_table(timings, threads=threads, rounds=rounds))
        agree = f"; outputs agree to {ratio:.1f} dB SQNR" if inputs is not None else ""
        console.print(f"{speed_up:.2f}x as fast as {against}{agree}")
        if inputs is None:
            console.print("the inputs were noise: --inputs compares the outputs on your data")
    check_figure(speed_up, fail_under, "the speed-up")


def stdout(quiet: bool = False) -> Console:
    """Standard output; wider than rich's 80 columns where it is no terminal."""
    console = Console(quiet=quiet)
    return console if console.is_terminal else Console(quiet=quiet, width=140)


def _tensors(leaves: Any) -> list[Any]:
    """Only the tensors: runtimes differ in whether they give literals back."""
    return [leaf for leaf in leaves if hasattr(leaf, "shape")]
