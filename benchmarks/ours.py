"""This project's road to a file, reduced to the same `Program` as the peers'."""

import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

import pt2e_quant as pq
from benchmarks.measure import Stopwatch
from benchmarks.runtimes import Program, Runtime, load_program
from pt2e_quant.backends.artifact import Artifact

LABEL = "pt2e_quant"
BACKENDS = {Runtime.EXECUTORCH: ("xnnpack", ".pte"), Runtime.ONNXRUNTIME: ("onnx", ".onnx")}


def quantize_int8(
    runtime: Runtime,
    model: nn.Module,
    inputs: tuple[Tensor, ...],
    batches: Sequence[tuple[Tensor, ...]],
) -> Program:
    """Return a model quantized with the recipe `int8`, through a saved file."""
    name, suffix = BACKENDS[runtime]
    backend = pq.backends.get(name)
    watch = Stopwatch()
    ep = watch.run("export", lambda: torch.export.export(model, inputs))
    prepared = watch.run("prepare", lambda: pq.prepare_pt2e(ep, backend.quantizer("int8")))
    watch.run("calibrate", lambda: pq.calibrate(prepared, batches, progress=False))
    quantized = watch.run("convert", lambda: pq.convert_pt2e(prepared))
    artifact = watch.run("lower", lambda: backend.lower(quantized))
    return through_file(LABEL, runtime, artifact, suffix, watch)


def quantize_without_data(
    runtime: Runtime, model: nn.Module, inputs: tuple[Tensor, ...], recipe: str
) -> Program:
    """Return a model quantized with a recipe that needs no calibration, through a saved file."""
    name, suffix = BACKENDS[runtime]
    backend = pq.backends.get(name)
    watch = Stopwatch()
    ep = watch.run("export", lambda: torch.export.export(model, inputs))
    prepared = watch.run("prepare", lambda: pq.prepare_pt2e(ep, backend.quantizer(recipe)))
    quantized = watch.run("convert", lambda: pq.convert_pt2e(prepared))
    artifact = watch.run("lower", lambda: backend.lower(quantized, inputs))
    return through_file(f"{LABEL} {recipe}", runtime, artifact, suffix, watch)


def through_file(
    label: str, runtime: Runtime, artifact: Artifact, suffix: str, watch: Stopwatch
) -> Program:
    """Save an artifact and load the file as everybody's are loaded."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"model{suffix}"
        artifact.save(path)
        return load_program(label, runtime, path.read_bytes(), watch.stages)
