"""What do 4-bit and dynamic recipes cost and give a language model, against the peers' files?

Run `python -m benchmarks.llm`. A small Llama is trained first, where `build/llama` has none.
"""

import argparse
import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import LlamaForCausalLM

from benchmarks import peers_low_bit as peers
from benchmarks.count_ops import OpCount, count_ops
from benchmarks.llama_model import BRIEF, TINY, trained_llama
from benchmarks.llm_ours import (
    FLOAT_TABLE,
    PROMPT,
    context_of,
    exporter,
    quantize_llama,
    step_of,
    untied,
)
from benchmarks.llm_quality import LanguageQuality, float_logits, judge
from benchmarks.llm_text import draw_windows
from benchmarks.measure import Latency, interleave
from benchmarks.ours import LABEL
from benchmarks.results import write_results
from benchmarks.runtimes import Program, Runtime
from pt2e_quant.flow.causal_lm import empty_cache

RECIPES = {
    # XNNPACK multiplies 4-bit groups by int8 activations alone
    Runtime.EXECUTORCH: ("int8_dynamic", "a8w4_g32", "a8w4_g128"),
    Runtime.ONNXRUNTIME: ("int8_dynamic", "a8w4_g32", "a8w4_g128", "w4_g128"),
}
WINDOWS_SEED = 12
console = Console(width=150)
Row = dict[str, object]


@dataclass(frozen=True, slots=True)
class Subject:
    """The float model, held-out windows int64[count, T], and the float logits on them."""

    model: LlamaForCausalLM
    windows: Tensor
    logits: list[Tensor]

    @property
    def name(self) -> str:
        """The model's name in the results."""
        config = self.model.config
        return f"llama {config.num_hidden_layers}x{config.hidden_size}"


@dataclass(frozen=True, slots=True)
class Entry:
    """A program, and the bits per weight of its quantized constants where the file says so."""

    program: Program
    weight_bits: float | None = None


def makers(
    subject: Subject, runtime: Runtime, recipes: Sequence[str], floating: Program
) -> dict[str, Callable[[], Entry]]:
    """Return what to build beside the float program, by label: ours first."""
    model, prompt = subject.model, subject.windows[:1, :PROMPT]

    def ours(recipe: str, keep_table: bool) -> Callable[[], Entry]:
        return lambda: Entry(*quantize_llama(runtime, model, recipe, prompt, keep_table=keep_table))

    def peer(make: Callable[..., Program], *arguments: object) -> Callable[[], Entry]:
        return lambda: Entry(make(*arguments))

    found = {f"{LABEL} {recipe}": ours(recipe, False) for recipe in recipes}
    if runtime is Runtime.EXECUTORCH:
        how = exporter(with_state=True)
        found["XNNPACKQuantizer dynamic"] = peer(peers.executorch_int8_dynamic, model, how)
        for size in (32, 128):
            label = f"torchao 8da4w g{size}"
            found[label] = peer(peers.executorch_quantize, model, how, size)
        return found
    found |= {f"{LABEL} {r}{FLOAT_TABLE}": ours(r, True) for r in recipes if "w4" in r}
    found["quantize_dynamic"] = peer(peers.onnx_dynamic, floating.data)
    alone = peers.onnx_float(untied(model), exporter(with_state=False)).data
    for size in (32, 128):
        for level, kind in peers.ACCURACY_LEVELS.items():
            label = f"MatMulNBits g{size} {kind}"
            found[label + FLOAT_TABLE] = matmul_nbits(floating.data, size, level, label)
            found[label] = matmul_nbits(alone, size, level, label, with_tables=True)
    return found


def matmul_nbits(
    data: bytes, size: int, level: int, label: str, *, with_tables: bool = False
) -> Callable[[], Entry]:
    """Return a maker of MatMulNBits: of a tied model's file, or with the table in 4 bits too."""
    label += "" if with_tables else FLOAT_TABLE
    return lambda: Entry(
        peers.onnx_matmul_nbits(data, size, level, with_tables=with_tables, label=label)
    )


def build(
    subject: Subject, runtime: Runtime, recipes: Sequence[str]
) -> tuple[list[Entry], list[Row]]:
    """Return the programs of one runtime, the float one first, and rows of what failed."""
    is_executorch = runtime is Runtime.EXECUTORCH
    make_float = peers.executorch_float if is_executorch else peers.onnx_float
    floating = make_float(subject.model, exporter(with_state=is_executorch))
    entries, failures = [Entry(floating, 32.0)], []
    for label, make in makers(subject, runtime, recipes, floating).items():
        console.print(f"{runtime}: building {label}")
        try:
            entries.append(make())
        except Exception as error:  # what cannot take the model is a result, not an abort
            reason = f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"
            failures.append({**identity(subject, runtime, label), "failure": reason})
            logging.getLogger(__name__).error("%s on %s", label, runtime, exc_info=error)
    return entries, failures


def time_calls(
    subject: Subject, entries: list[Entry], rounds: int
) -> dict[str, dict[str, Latency]]:
    """Return latencies by kind of call and label: a token after the prompt, and the prompt."""
    window = subject.windows[:1]
    calls = {
        "decode": (window[:, PROMPT : PROMPT + 1].contiguous(), torch.tensor([PROMPT])),
        "prompt": (window[:, :PROMPT].contiguous(), torch.arange(PROMPT)),
    }
    cache = empty_cache(subject.model, context_of(subject.model))
    found = {}
    for kind, inputs in calls.items():
        bound = {}
        for program in (entry.program for entry in entries):
            extra = cache if program.runtime is Runtime.ONNXRUNTIME else []
            bound[program.label] = program.bind(*inputs, *extra)
        found[kind] = interleave(bound, rounds=rounds)
    return found


def identity(subject: Subject, runtime: Runtime, label: str) -> Row:
    """Return the fields that tell one measurement from another."""
    return {"model": subject.name, "runtime": str(runtime), "program": label}


def make_row(
    subject: Subject,
    entry: Entry,
    quality: LanguageQuality,
    latencies: Mapping[str, Mapping[str, Latency]],
) -> Row:
    """Return what the table and the JSON say about one program."""
    program = entry.program
    ops: OpCount = count_ops(program)
    parameters = sum(p.numel() for p in subject.model.parameters())
    row: Row = {
        **identity(subject, program.runtime, program.label),
        "perplexity": round(quality.perplexity, 3),
        "sqnr_db": round(quality.sqnr_db, 2),
        "same_choice": round(quality.same_choice, 4),
    }
    for kind, by_label in latencies.items():
        latency = by_label[program.label]
        row[f"{kind}_ms"] = round(latency.median_ms, 3)
        row[f"{kind}_speed_up"] = round(by_label["float"].median_ms / latency.median_ms, 2)
    return {
        **row,
        "size_bytes": program.size_bytes,
        "file_bits_per_parameter": round(8 * program.size_bytes / parameters, 2),
        "weight_bits": None if entry.weight_bits is None else round(entry.weight_bits, 3),
        "partitions": ops.partitions,
        "undelegated": ops.undelegated,
        "stages_s": {stage: round(seconds, 2) for stage, seconds in program.stages.items()},
    }


COLUMNS = {
    "ppl": "perplexity",
    "dB": "sqnr_db",
    "same": "same_choice",
    "decode ms": "decode_ms",
    "x float": "decode_speed_up",
    f"prompt {PROMPT} ms": "prompt_ms",
    "x": "prompt_speed_up",
    "bytes": "size_bytes",
    "file b/p": "file_bits_per_parameter",
    "weight b": "weight_bits",
    "parts": "partitions",
    "outside": "undelegated",
}


def show(rows: list[Row]) -> None:
    """Print one table: a line for each program."""
    table = Table("runtime", "program", title=f"{rows[0]['model']}, batch 1, one thread")
    for heading in COLUMNS:
        table.add_column(heading, justify="right")
    for row in rows:
        names = (str(row["runtime"]), str(row["program"]))
        if "failure" in row:
            table.add_row(*names, "[red]failed[/]")
        else:
            table.add_row(
                *names, *("" if row[k] is None else str(row[k]) for k in COLUMNS.values())
            )
    console.print(table)
    for row in rows:
        if "failure" in row:
            console.print(f"{row['program']} failed: {row['failure']}", style="red")


def measure_runtime(
    subject: Subject, runtime: Runtime, recipes: Sequence[str], rounds: int
) -> list[Row]:
    """Build, judge and time every program of one runtime; return one row for each."""
    entries, rows = build(subject, runtime, recipes)
    latencies = time_calls(subject, entries, rounds)
    for entry in entries:
        step = step_of(entry.program, subject.model)
        quality = judge(step, subject.windows, subject.logits, PROMPT)
        rows.append(make_row(subject, entry, quality, latencies))
    return rows


def main() -> None:
    """Measure the trained Llama on the asked runtimes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runtimes", nargs="+", choices=list(Runtime), default=list(Runtime))
    parser.add_argument("--recipes", nargs="+", help="instead of the three of each runtime")
    parser.add_argument("--windows", type=int, default=24, help="held-out windows of text")
    parser.add_argument("--decode", type=int, default=64, help="tokens one by one in each window")
    parser.add_argument("--rounds", type=int, default=200, help="timed rounds of each program")
    parser.add_argument("--tiny", action="store_true", help="a model trained in seconds")
    parser.add_argument("--no-write", action="store_true", help="leave the results file alone")
    options = parser.parse_args()
    torch.set_num_threads(1)
    trained = trained_llama(TINY, BRIEF) if options.tiny else trained_llama()
    windows = draw_windows(trained.held_out, options.windows, PROMPT + options.decode, WINDOWS_SEED)
    subject = Subject(trained.model, windows, float_logits(trained.model, windows))
    for runtime in map(Runtime, options.runtimes):
        recipes = options.recipes or RECIPES[runtime]
        rows = measure_runtime(subject, runtime, recipes, options.rounds)
        show(rows)
        if not options.no_write:
            write_results("llm", rows, ("model", "runtime", "program"))


if __name__ == "__main__":
    warnings.filterwarnings("ignore")  # the peers' own
    logging.getLogger("root").setLevel(logging.ERROR)
    main()
