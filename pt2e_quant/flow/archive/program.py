"""save and load: a prepared or converted program, or a QAT checkpoint, in one file."""

import hashlib
import json
import platform
import zlib
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from pt2e_quant.core.errors import ArtifactError, ConfigError, Pt2eQuantError
from pt2e_quant.core.provenance import PROVENANCE_KEY
from pt2e_quant.core.read_capture import CAPTURE_KEY
from pt2e_quant.core.whole_file import whole_file
from pt2e_quant.flow.archive.graph_reader import GraphReader
from pt2e_quant.flow.archive.graph_writer import GraphWriter
from pt2e_quant.flow.archive.layout import (
    FORMAT,
    PROGRAM,
    SAFETENSORS_NAMES,
    VERSION,
    bytes_of,
    reported,
)
from pt2e_quant.flow.archive.modules import ModuleReader, ModuleWriter
from pt2e_quant.flow.archive.read_files import Contents, read_archive, read_program
from pt2e_quant.flow.archive.symbols import FakeReader, FakeWriter
from pt2e_quant.flow.archive.tensor_store import TensorReader, TensorWriter
from pt2e_quant.flow.archive.values import ValueReader, ValueWriter
from pt2e_quant.flow.calibrate.sample import SAMPLE_KEY
from pt2e_quant.flow.prepare.input_check import check_inputs, install_input_check
from pt2e_quant.flow.prepare.prepared import PREPARED_KEY
from pt2e_quant.flow.qat.train_mode import allow_exported_model_train_eval
from pt2e_quant.graph.pickling.pickle_module import make_picklable


def write_archive(
    path: Path, program: Mapping[str, Any], tensors: Mapping[str, Tensor], shard_bytes: int | None
) -> None:
    """Write a program and its tensors; temporary names first, then renamed.

    Args:
        path: of the file; further shards stand beside it.
        program: a JSON value.
        tensors: contiguous, any device; written one at a time.
        shard_bytes: begin another file where one would grow beyond this many bytes of tensors.

    Raises:
        ArtifactError: the path cannot be written.
    """
    shards = _distribute(tensors, shard_bytes)
    hashes = {name: hashlib.sha256(bytes_of(t)).hexdigest() for name, t in tensors.items()}
    digest = hashlib.sha256("".join(hashes.values()).encode()).hexdigest()[:12]
    names = [f"{path.stem}-{digest}-{i:05d}{path.suffix}" for i in range(1, len(shards))]
    table = {
        name: [_name_of(t.dtype), list(t.shape), hashes[name], number]
        for number, shard in enumerate(shards)
        for name, t in shard.items()
    }
    text = json.dumps(
        {"version": VERSION, "parts": table, "shards": names, "program": program},
        allow_nan=False,
        separators=(",", ":"),
    )
    packed = torch.frombuffer(bytearray(zlib.compress(text.encode(), 6)), dtype=torch.uint8)
    metadata = {"format": FORMAT, "version": str(VERSION)}
    main = metadata | {"sha256": hashlib.sha256(bytes_of(packed)).hexdigest()}
    old = _shards_of(path)
    with reported(path):
        for name, shard in zip(names, shards[1:], strict=True):
            _write_file(path.with_name(name), metadata | {"shard": name}, shard)
        _write_file(path, main, {PROGRAM: packed, **shards[0]})
        for name in set(old) - set(names):
            path.with_name(name).unlink(missing_ok=True)


def _distribute(tensors: Mapping[str, Tensor], shard_bytes: int | None) -> list[dict[str, Tensor]]:
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        length = tensor.numel() * tensor.element_size()
        if shard_bytes is not None and shards[-1] and size + length > shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += length
    return shards


def _write_file(path: Path, metadata: Mapping[str, str], tensors: Mapping[str, Tensor]) -> None:
    # Wide elements first: then every tensor begins at a multiple of its element's size.
    ordered = sorted(tensors.items(), key=lambda item: -item[1].element_size())
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    place = 0
    for name, tensor in ordered:
        length = tensor.numel() * tensor.element_size()
        known = tensor.dtype in SAFETENSORS_NAMES
        header[name] = {
            "dtype": SAFETENSORS_NAMES.get(tensor.dtype, "U8"),
            "shape": list(tensor.shape) if known else [length],
            "data_offsets": [place, place + length],
        }
        place += length
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with whole_file(path) as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for _, tensor in ordered:
            stream.write(bytes_of(tensor))


def _shards_of(path: Path) -> tuple[str, ...]:
    """The further shards of the file that is there, none if there is none that can be read."""
    with suppress(ArtifactError, OSError), path.open("rb") as stream:
        return read_program(path, stream).shards
    return ()


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


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
    sample = program.meta.get(SAMPLE_KEY)
    if not keep_sample:
        program.meta.pop(SAMPLE_KEY, None)
    try:
        written, blocks = describe(program)
    finally:
        if sample is not None:
            program.meta[SAMPLE_KEY] = sample
    write_archive(Path(path), written, blocks, shard_bytes)


def describe(program: GraphModule) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """All of a program as a JSON value, and the tensors that it names.

    Raises:
        UnsupportedError: naming the node or attribute that a file cannot hold.
    """
    tensors, fakes, modules = TensorWriter(), FakeWriter(), ModuleWriter()

    def number(module: nn.Module) -> int:
        return modules.number(module, values)

    values = ValueWriter(tensors, fakes, number)
    graph = GraphWriter(values, modules).write(program)
    entries, blocks = tensors.finish()
    return {
        "kind": "prepared" if PREPARED_KEY in program.meta else "converted",
        "writer": _versions(),
        "checks_inputs": check_inputs in program._forward_pre_hooks.values(),
        "trains": "train" in vars(program),
        "graph": graph,
        "modules": modules.entries,
        "symbols": fakes.symbols,
        "tensors": entries,
    }, blocks


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
            return rebuild(contents.program, contents.tensors, namespaces)
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


def rebuild(
    program: Mapping[str, Any], blocks: Mapping[str, Tensor], namespaces: tuple[str, ...] = ()
) -> GraphModule:
    """The program that `describe` gave, with the tensors that it names."""
    tensors = TensorReader(program["tensors"], blocks)
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
