"""How fast is int8 on this CPU: the cpu backend, Inductor's x86 path, ONNX Runtime and XNNPACK?

Run `python -m benchmarks.cpu --models digits resnet18 --threads 1`, and once more with
`--threads 2`: the thread pools are set up once a process. Times are wall times, or with
`--cpu-time` of the process's CPUs, which a loaded machine disturbs less.
"""

import argparse
import copy
import logging
import math
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch._inductor import config as inductor_config

import pt2e_quant as pq
from benchmarks import ours
from benchmarks.cases import CASES, Case, llama_case
from benchmarks.measure import Latency, interleave, mean_cosine, sqnr_db
from benchmarks.peers import feed
from benchmarks.results import write_results
from benchmarks.runtimes import Runtime
from pt2e_quant.backends.artifact import Artifact
from pt2e_quant.backends.target.backend import Backend

console = Console(width=130)
Row = dict[str, object]
Call = Callable[..., Sequence[Tensor]]
FLOAT, BF16 = "float, torch.compile", "bfloat16, torch.compile"
INDUCTOR, OURS = "X86Inductor, torch.compile", "pt2e_quant cpu"
CPU_CASES = {**CASES, "llama": llama_case}


@dataclass(frozen=True, slots=True)
class Contender:
    """One program: a call on flat inputs, and its share of the time of the float one."""

    label: str
    run: Call


def compiled(module: nn.Module, example: tuple[Tensor, ...]) -> Call:
    """Compile with frozen, prepacked weights, and run once so that nothing is left to compile."""
    call = torch.compile(module)

    def run(*inputs: Tensor) -> Sequence[Tensor]:
        with torch.no_grad():
            return torch.utils._pytree.tree_leaves(call(*inputs))

    with inductor_config.patch(freezing=True):
        run(*example)
    return run


def bfloat16(case: Case) -> Call:
    """The float model in bfloat16, compiled with prepacked weights."""
    model = copy.deepcopy(case.model).bfloat16()

    def cast(inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(x.bfloat16() if x.is_floating_point() else x for x in inputs)

    call = compiled(model, cast(case.example))
    return lambda *inputs: [value.float() for value in call(*cast(inputs))]


class OwnRelu(nn.Module):
    """A relu that counts as another one wherever it is called."""

    def forward(self, x: Tensor) -> Tensor:
        """Return relu(x)."""
        return nn.functional.relu(x)


def with_own_relus(model: nn.Module) -> nn.Module:
    """A copy whose relus X86InductorQuantizer can tell apart: a shared nn.ReLU ends its prepare."""
    made = copy.deepcopy(model)
    for module in list(made.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.ReLU):
                setattr(module, name, OwnRelu())
    return made


def x86_inductor(case: Case) -> Call:
    """Torchao's X86InductorQuantizer as its tutorial has it: its own prepare and convert."""
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
    from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86

    made = x86.get_default_x86_inductor_quantization_config()
    quantizer = x86.X86InductorQuantizer().set_global(made)
    exported = torch.export.export(with_own_relus(case.model), case.example)
    prepared = prepare_pt2e(exported.module(), quantizer)
    feed(prepared, case.calibration)
    return compiled(convert_pt2e(prepared), case.example)


def quantized(case: Case, backend: Backend, recipe: str = "int8") -> Artifact:
    """The model through a backend of this package."""
    exported = torch.export.export(case.model, case.example)
    prepared = pq.prepare_pt2e(exported, backend.quantizer(recipe))
    pq.calibrate(prepared, case.calibration, progress=False)
    return backend.lower(pq.convert_pt2e(prepared))


def cpu(case: Case) -> Call:
    """This package's fused oneDNN module, which needs no compiler."""
    artifact = quantized(case, pq.backends.get("cpu"))
    return lambda *inputs: artifact.run_leaves(inputs)


def cpu_compiled(case: Case, recipe: str = "int8") -> Call:
    """The same program compiled ahead of time."""
    artifact = quantized(case, pq.backends.get("cpu"), recipe)
    artifact.compile()  # type: ignore[attr-defined]
    return lambda *inputs: artifact.run_leaves(inputs)


def has_attention(case: Case) -> bool:
    """Whether recipe int8_bf16 differs from int8 on a model."""
    graph = torch.export.export(case.model, case.example).graph
    attention = torch.ops.aten.scaled_dot_product_attention.default
    return any(node.target is attention for node in graph.nodes)


def onnx(case: Case, threads: int) -> Call:
    """This package's .onnx in ONNX Runtime."""
    artifact = quantized(case, pq.backends.get("onnx"))
    artifact.limit_threads(threads)  # type: ignore[attr-defined]
    return lambda *inputs: artifact.run_leaves(inputs)


def xnnpack(case: Case, threads: int) -> Call:
    """This package's .pte in ExecuTorch."""
    program = ours.quantize_int8(Runtime.EXECUTORCH, case.model, case.example, case.calibration)
    from executorch.extension.pybindings import portable_lib

    portable_lib._unsafe_reset_threadpool(threads)  # loading has set one thread
    # The loaded program reads the bytes that `program` holds.
    return lambda *inputs: program.bind(*inputs)()


def contenders(case: Case, threads: int) -> tuple[list[Contender], dict[str, str]]:
    """Every program that can be built, the float one first, and why the others cannot."""
    # What torch.compile makes comes last: ExecuTorch's first lowering exports patterns of its own,
    # which makes dynamo forget what it has compiled.
    makers: dict[str, Callable[[], Call]] = {
        "pt2e_quant on XNNPACK": lambda: xnnpack(case, threads),
        "pt2e_quant on ONNX Runtime": lambda: onnx(case, threads),
        f"{OURS} int8_bf16, compiled": lambda: cpu_compiled(case, "int8_bf16"),
        f"{OURS}, compiled": lambda: cpu_compiled(case),
        OURS: lambda: cpu(case),
        INDUCTOR: lambda: x86_inductor(case),
        BF16: lambda: bfloat16(case),
        FLOAT: lambda: compiled(case.model, case.example),
    }
    if not has_attention(case):
        del makers[f"{OURS} int8_bf16, compiled"]
    found: list[Contender] = []
    failures: dict[str, str] = {}
    for label, make in makers.items():
        try:
            found.append(Contender(label, make()))
        except Exception as error:  # a peer that cannot take a model is a result, not an abort
            failures[label] = f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"
            logging.getLogger(__name__).error("%s on %s", label, case.name, exc_info=error)
    return found[::-1], failures


def measure(
    case: Case, threads: int, rounds: int, clock: Callable[[], float] = time.perf_counter
) -> list[Row]:
    """One row for each program of a case."""
    found, failures = contenders(case, threads)
    with torch.no_grad():
        reference = [case.model(*batch) for batch in case.held_out]
    calls = {c.label: lambda c=c: c.run(*case.example) for c in found}
    with torch.compiler.set_stance("fail_on_recompile"):  # a second time would not be frozen
        latencies = interleave(calls, rounds=rounds, clock=clock)
    same = {"model": case.name, "threads": threads, "input_size": case.example[0].shape[-1]}
    rows: list[Row] = [{**same, "program": k, "failure": why} for k, why in failures.items()]
    for contender in found:
        outputs = [contender.run(*batch)[0].clone() for batch in case.held_out]
        quality = sqnr_db(reference, outputs), mean_cosine(reference, outputs)
        rows.append({**same, "program": contender.label, **figures(contender, quality, latencies)})
    return rows


def figures(
    contender: Contender, quality: tuple[float, float], latencies: dict[str, Latency]
) -> Row:
    """What the table and the JSON say about one program."""
    latency = latencies[contender.label]
    return {
        "sqnr_db": round(quality[0], 2) if math.isfinite(quality[0]) else str(quality[0]),
        "cosine": round(quality[1], 5),
        "median_ms": round(latency.median_ms, 3),
        "min_ms": round(latency.min_ms, 3),
        "speed_up": round(latencies[FLOAT].median_ms / latency.median_ms, 2),
    }


def show(rows: list[Row]) -> None:
    """Print one line for each program."""
    table = Table("model", "threads", "program", title="int8 on this CPU, batch 1")
    for heading in ("dB", "cosine", "median ms", "min ms", "speed-up"):
        table.add_column(heading, justify="right")
    for row in rows:
        names = [str(row[key]) for key in ("model", "threads", "program")]
        if "failure" in row:
            table.add_row(*names, "[red]failed[/]")
            continue
        values = (row[key] for key in ("sqnr_db", "cosine", "median_ms", "min_ms", "speed_up"))
        table.add_row(*names, *(str(value) for value in values))
    console.print(table)


def main() -> None:
    """Measure the asked models on so many threads."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=CPU_CASES, default=list(CPU_CASES))
    parser.add_argument("--image", type=int, default=224, help="side of the square images")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=50, help="timed rounds of each program")
    parser.add_argument("--cpu-time", action="store_true", help="CPU time instead of wall time")
    parser.add_argument("--no-write", action="store_true", help="print only")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    clock = time.process_time if options.cpu_time else time.perf_counter
    for name in options.models:
        case = CPU_CASES[name](image=options.image)
        rows = measure(case, options.threads, options.rounds, clock)
        show(rows)
        if not options.no_write:
            write_results("cpu", rows, ("model", "threads", "program", "input_size"))


if __name__ == "__main__":
    warnings.filterwarnings("ignore")  # the peers' own
    logging.getLogger("root").setLevel(logging.ERROR)
    main()
