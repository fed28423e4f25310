"""The commands that look at a model, and the one that chooses a mix of schemes for it."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from pt2e_quant.analysis.compare import compare as compare_models
from pt2e_quant.analysis.profile import profile as profile_call
from pt2e_quant.analysis.sensitivity import sensitivity as weigh_groups
from pt2e_quant.analysis.tune import tune as tune_model
from pt2e_quant.analysis.write_page import write_page
from pt2e_quant.backends.artifact import Artifact
from pt2e_quant.backends.registry import get
from pt2e_quant.command_line.app import DATA_HELP, BatchSize, File, Imports, Json, app, stdout
from pt2e_quant.command_line.data_file import read_data
from pt2e_quant.command_line.fail_under import (
    FailUnder,
    check_figure,
    check_report,
    decibels,
)
from pt2e_quant.command_line.make_batches import make_batches
from pt2e_quant.command_line.number_options import cosine, positive
from pt2e_quant.command_line.open_model import open_model
from pt2e_quant.command_line.print_output import print_json
from pt2e_quant.command_line.program_file import load_program
from pt2e_quant.command_line.quantize_file import as_option, read_pick
from pt2e_quant.command_line.result_file import artifact_path, check_writable
from pt2e_quant.core.capture import Capture
from pt2e_quant.core.errors import ConfigError, InputError
from pt2e_quant.core.read_capture import rebuild_capture
from pt2e_quant.core.unlift import graph_module_of
from pt2e_quant.flow.archive.program import load
from pt2e_quant.flow.calibrate.pick_inputs import bind_batch
from pt2e_quant.flow.report.audit import audit as audit_of

Program = Annotated[Path, typer.Argument(help="A .pt2 file of torch.export.save, in float.")]
Quantized = Annotated[
    Path | None, typer.Option(help="The graph that the file was made of, by pq.save.")
]
Inputs = Annotated[str, typer.Option(help=DATA_HELP)]
Pick = Annotated[
    list[str] | None,
    typer.Option(
        help="What the model takes of each batch of module:function, or of a list in a .pt: a key "
        "or an index; repeatable. --pick 0 for batches of (images, labels)."
    ),
]
Backend = Annotated[str, typer.Option(help="xnnpack, onnx, cpu or cuda.")]
Method = Annotated[str, typer.Option(help="How groups are weighed: exact, gradient or weight.")]
Recipe = Annotated[str, typer.Option(help="A recipe of the backend, or a recipe file (.toml).")]


def _batches(
    source: str, capture: Capture, batch_size: int | None, pick: Sequence[str] | None
) -> list[Any]:
    """The batches of a data file as the model takes them."""
    found = list(make_batches(read_data(source), capture, batch_size=batch_size).batches)
    if not found:
        raise InputError(f"{source} gives no batch", fix="give at least one sample")
    inputs = read_pick(pick or ())
    try:
        leaves = [bind_batch(capture, batch, inputs) for batch in found]
    except InputError as error:
        raise InputError(
            f"{source}: {error.what}", fix=error.fix and as_option(error.fix)
        ) from error
    return [dict(zip(capture.arg_names, capture.positional(call), strict=True)) for call in leaves]


@app.command()
def inspect(
    file: File, fail_under: FailUnder = None, as_json: Json = False, imports: Imports = None
) -> None:
    """Show what of a file is quantized, how, what is not and why, and the size of each tensor.

    --fail-under is of the SQNR of the quantized graph against the float model, in dB, as it was
    when the file was made.
    """
    found = open_model(file).report
    if as_json:
        print_json("inspect", json.loads(found.to_json()))
    else:
        console = stdout()
        for table in found.tables():
            console.print(table)
        for note in [*found.notes, *found.provenance.notes]:
            console.print(f"note: {note}", soft_wrap=True, markup=False)
    check_report(found, fail_under)


@app.command()
def audit(
    file: File, fail_under: FailUnder = None, as_json: Json = False, imports: Imports = None
) -> None:
    """List what a chip of integers alone could not run: where, why, and what would help.

    --fail-under is of the share of the operators that compute in integers, 0 to 1.
    """
    found = audit_of(open_model(file).program)
    if as_json:
        print_json("audit", json.loads(found.to_json()))
    else:
        stdout().print(str(found), soft_wrap=True, markup=False)
    check_figure(found.share_in_integers, fail_under, "the share of operators in integers")


@app.command()
def compare(
    file: File,
    against: Annotated[Path, typer.Option(help="The float model, a .pt2.")],
    inputs: Inputs,
    quantized: Quantized = None,
    pick: Pick = None,
    batch_size: BatchSize = None,
    fail_under: FailUnder = None,
    as_json: Json = False,
    imports: Imports = None,
) -> None:
    """List what each tensor of a file loses against the float model; the worst first.

    Without --quantized only the results of a .pte are compared.

    --fail-under is of the SQNR of the results, in dB.
    """
    opened = open_model(file)
    reference = load_program(against)
    batches = _batches(inputs, opened.capture, batch_size, pick)
    found = compare_models(
        reference,
        opened.program,
        batches,
        quantized=None if quantized is None else load(quantized),
        progress=not as_json,
    )
    if as_json:
        print_json("compare", json.loads(found.to_json()))
    else:
        typer.echo(str(found))
    check_figure(found.sqnr_db, fail_under, "the SQNR of the results in dB")


@app.command()
def sensitivity(
    model: Program,
    inputs: Inputs,
    backend: Backend,
    recipe: Recipe = "int8",
    method: Method = "exact",
    pick: Pick = None,
    batch_size: BatchSize = None,
    fail_under: FailUnder = None,
    as_json: Json = False,
    imports: Imports = None,
) -> None:
    """List what quantizing each group of operators alone costs; the worst first.

    --fail-under is of the SQNR of the results with the worst group alone quantized, in dB; by the
    method weight of that group's weights.
    """
    program = load_program(model)
    batches = _batches(inputs, _capture(program), batch_size, pick)
    found = weigh_groups(
        program, recipe, batches, backend=backend, method=method, progress=not as_json
    )
    if as_json:
        print_json("sensitivity", json.loads(found.to_json()))
    else:
        typer.echo(str(found))
    worst = max((group.cost for group in found), default=0.0)
    check_figure(decibels(worst), fail_under, "the SQNR with the worst group alone in dB")


@app.command()
def tune(
    model: Program,
    backend: Backend,
    calibration_data: Annotated[str, typer.Option(help=DATA_HELP)],
    recipe: Recipe = "int8",
    target: Annotated[
        float | None, typer.Option(help="The cosine to reach.", callback=cosine)
    ] = None,
    budget_bytes: Annotated[
        float | None, typer.Option(help="Bytes of all constants.", callback=positive)
    ] = None,
    budget_bits: Annotated[
        float | None, typer.Option(help="Mean bits of an element.", callback=positive)
    ] = None,
    budget_latency_us: Annotated[
        float | None,
        typer.Option(help="Microseconds of a call, timed on this machine.", callback=positive),
    ] = None,
    menu: Annotated[
        list[str] | None, typer.Option(help="Another recipe that groups may get; repeatable.")
    ] = None,
    method: Method = "exact",
    points: Annotated[int, typer.Option(min=0, help="Further mixes for the front.")] = 4,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="File to write.")] = None,
    save_recipe: Annotated[Path | None, typer.Option(help="A .toml for the recipe.")] = None,
    pick: Pick = None,
    batch_size: BatchSize = None,
    fail_under: FailUnder = None,
    as_json: Json = False,
    imports: Imports = None,
) -> None:
    """Choose a scheme for each group of operators: for a cosine, or within a budget.

    --fail-under is of the cosine with the float model's outputs.
    """
    written = artifact_path(output, model, get(backend))
    if save_recipe is not None:
        check_writable(save_recipe)
    program = load_program(model)
    found = tune_model(
        program,
        calibration_data=_batches(calibration_data, _capture(program), batch_size, pick),
        backend=backend,
        recipe=recipe,
        target=target,
        budget=_budget(bytes=budget_bytes, bits=budget_bits, latency_us=budget_latency_us),
        menu=menu,
        method=method,
        points=points,
        progress=not as_json,
    )
    found.artifact.save(written)
    if save_recipe is not None:
        found.recipe.save(save_recipe)
    if as_json:
        print_json("tune", {**found.to_dict(), "file": str(written)})
    else:
        typer.echo(f"{found}wrote {written} ({found.artifact.size_bytes:,} bytes)")
    check_figure(found.metric, fail_under, "the cosine")


def _budget(**given: float | None) -> dict[str, float] | None:
    found = {unit: amount for unit, amount in given.items() if amount is not None}
    return found or None


def _capture(program: Any) -> Capture:
    return rebuild_capture(graph_module_of(program))


@app.command()
def profile(
    file: File,
    inputs: Inputs,
    pick: Pick = None,
    batch_size: BatchSize = None,
    fail_under: FailUnder = None,
    as_json: Json = False,
    imports: Imports = None,
) -> None:
    """List how long each operator of a file takes in one call; the longest first.

    --fail-under is of the share of the operators' time that is in integers, 0 to 1.
    """
    opened = open_model(file)
    batch = _batches(inputs, opened.capture, batch_size, pick)[0]
    found = profile_call(opened.program, batch)
    if as_json:
        print_json("profile", json.loads(found.to_json()))
    else:
        typer.echo(str(found))
    check_figure(found.share_in_integers, fail_under, "the share of the time in integers")


@app.command()
def report(
    file: File,
    output: Annotated[Path, typer.Option("--output", "-o", help="The .html file.")],
    inputs: Annotated[str | None, typer.Option(help=DATA_HELP)] = None,
    against: Annotated[Path | None, typer.Option(help="The float model, a .pt2.")] = None,
    quantized: Quantized = None,
    pick: Pick = None,
    batch_size: BatchSize = None,
    fail_under: FailUnder = None,
    as_json: Json = False,
    imports: Imports = None,
) -> None:
    """Write one page of HTML on a file; with data also the time of each operator.

    With data and --against also what each tensor loses; --quantized adds histograms, advice and a
    picture of the graph.

    --fail-under is of the SQNR of the quantized graph against the float model, in dB, as it was
    when the file was made.
    """
    check_writable(output)
    opened = open_model(file)
    batches: Sequence[Any] = ()
    if inputs is not None:
        batches = _batches(inputs, opened.capture, batch_size, pick)
    elif against is not None or quantized is not None:
        raise ConfigError("--against and --quantized need --inputs", fix="give --inputs data.npz")
    if isinstance(opened.program, Artifact):
        reference = None if against is None else load_program(against)
        graph = None if quantized is None else load(quantized)
        write_page(output, opened.program, batches, reference=reference, quantized=graph)
    elif batches:
        raise ConfigError(
            f"{file} is a program of torch: its page takes no data",
            fix="leave --inputs out, or give a file that a backend wrote",
        )
    else:
        opened.report.to_html(output)
    if as_json:
        facts = {"file": str(output), "report": json.loads(opened.report.to_json())}
        print_json("report", facts)
    else:
        typer.echo(f"wrote {output} ({output.stat().st_size:,} bytes)")
    check_report(opened.report, fail_under)


COMMANDS = app
"""Every command, those of this file too."""
