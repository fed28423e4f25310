"""save and load: a prepared or converted program, or a QAT checkpoint, in one file."""

import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from pt2e_quant.core.errors import ArtifactError, ConfigError, Pt2eQuantError
from pt2e_quant.core.provenance import PROVENANCE_KEY
from pt2e_quant.core.read_capture import CAPTURE_KEY
from pt2e_quant.flow.archive.graph_reader import GraphReader
from pt2e_quant.flow.archive.graph_writer import GraphWriter
from pt2e_quant.flow.archive.modules import ModuleReader, ModuleWriter
from pt2e_quant.flow.archive.read_files import Contents, read_archive
from pt2e_quant.flow.archive.symbols import FakeReader, FakeWriter
from pt2e_quant.flow.archive.tensor_store import TensorReader, TensorWriter
from pt2e_quant.flow.archive.values import ValueReader, ValueWriter
from pt2e_quant.flow.archive.write_files import write_archive
from pt2e_quant.flow.calibrate.sample import SAMPLE_KEY
from pt2e_quant.flow.prepare.input_check import check_inputs, install_input_check
from pt2e_quant.flow.prepare.prepared import PREPARED_KEY
from pt2e_quant.flow.qat.train_mode import allow_exported_model_train_eval
from pt2e_quant.graph.pickling.pickle_module import make_picklable

__all__ = ["load", "save"]


def save(
    program: GraphModule,
    path: str | Path,
    *,
    shard_bytes: int | None = None,
    keep_sample: bool = True,
) -> None:
    """Write a prepared or converted program to a file; docs/file_format.md says what is in it.

    A prepared program keeps its observers and fake-quantizes with all they have seen and learned.
    Tied weights stay tied, mutated buffers and dynamic sizes stay what they are.

    Args:
        program: of `prepare_pt2e`, `prepare_qat_pt2e` or `convert_pt2e`.
        path: of the file, which is replaced only when all is written.
        shard_bytes: begin another file beside it where one would hold more bytes of tensors.
        keep_sample: store the sample call that a lowering checks its artifact with: the first
            batch of calibration data, and the float result.

    Raises:
        ConfigError: the program is something else, or shard_bytes is no positive number.
        UnsupportedError: naming the node or attribute that a file cannot hold.
        ArtifactError: the path cannot be written.
    """
    known = (PREPARED_KEY, PROVENANCE_KEY, CAPTURE_KEY)
    if not isinstance(program, GraphModule) or not any(key in program.meta for key in known):
        raise ConfigError(
            f"save takes a program of prepare_pt2e or convert_pt2e, found {type(program).__name__}",
            fix="an artifact has a save of its own; a float program: torch.export.save",
        )
    if shard_bytes is not None and shard_bytes < 1:
        raise ConfigError(f"shard_bytes must be positive, found {shard_bytes}")
    tensors, fakes, modules = TensorWriter(), FakeWriter(), ModuleWriter()

    def number(module: nn.Module) -> int:
        return modules.number(module, values)

    values = ValueWriter(tensors, fakes, number)
    sample = program.meta.get(SAMPLE_KEY)
    if not keep_sample:
        program.meta.pop(SAMPLE_KEY, None)
    try:
        graph = GraphWriter(values, modules).write(program)
    finally:
        if sample is not None:
            program.meta[SAMPLE_KEY] = sample
    rows, blocks = tensors.finish()
    written = {
        "kind": "prepared" if PREPARED_KEY in program.meta else "converted",
        "writer": _versions(),
        "checks_inputs": check_inputs in program._forward_pre_hooks.values(),
        "trains": "train" in vars(program),
        "graph": graph,
        "modules": modules.rows,
        "symbols": fakes.symbols,
        "tensors": rows,
    }
    write_archive(Path(path), written, blocks, shard_bytes)


def load(
    path: str | Path,
    *,
    mmap: bool = False,
    verify: bool = True,
    namespaces: tuple[str, ...] = (),
) -> GraphModule:
    """Read what `save` wrote. Nothing in a file is unpickled, imported by its wish, or run.

    Args:
        path: of the file; its shards stand beside it.
        mmap: map the file instead of reading it: tensors come in when they are used, and writes
            to them stay in memory. Nobody may shorten the file meanwhile.
        verify: compare every tensor with its checksum, which reads them all.
        namespaces: operator libraries of your own that the program may call.

    Returns:
        The program: to calibrate or train on, to convert, or to lower.

    Raises:
        ArtifactError: the file is missing, damaged, of a newer version, or calls something that
            a file may not call.
    """
    contents = read_archive(Path(path), mmap=mmap, verify=verify)
    try:
        with torch.no_grad():
            return _read(contents, namespaces)
    except Pt2eQuantError:
        raise
    except Exception as error:
        # Its checksums are right, so another version of this package or of torch wrote it: what
        # is raised of a value that does not fit is as varied as the values.
        raise ArtifactError(
            f"{path} cannot be read by pt2e-quant {_versions()['pt2e_quant']} with torch "
            f"{torch.__version__}: {type(error).__name__}: {error}",
            fix=f"use the versions that wrote it: {_writer(contents)}",
        ) from error


def _read(contents: Contents, namespaces: tuple[str, ...]) -> GraphModule:
    program = contents.program
    tensors = TensorReader(program["tensors"], contents.tensors)
    fakes = FakeReader(program["symbols"])
    modules = ModuleReader(program["modules"])

    def module(number: int) -> nn.Module:
        return modules.get(number, values)

    values = ValueReader(tensors, fakes, module, namespaces)
    gm = GraphReader(values, modules).read(program["graph"])
    if program["checks_inputs"]:
        install_input_check(gm)
    if program["trains"]:
        allow_exported_model_train_eval(gm)
    make_picklable(gm)
    return gm


def _versions() -> dict[str, str]:
    try:
        own = version("pt2e-quant")
    except PackageNotFoundError:  # run from a checkout
        own = "unknown"
    return {"pt2e_quant": own, "torch": torch.__version__, "python": platform.python_version()}


def _writer(contents: Contents) -> str:
    writer: Any = contents.program.get("writer", {}) if isinstance(contents.program, dict) else {}
    return ", ".join(f"{name} {value}" for name, value in dict(writer).items()) or "unknown"
