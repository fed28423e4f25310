"""Eager modules quantized in place, beside torchao: error, memory, latency, time to quantize.

    python -m benchmarks.tensors [--compiled] [--rounds 25] [--seeds 8] [--quantize 9]

One thread. Both libraries quantize equal copies of a model; calls are timed in turn, in processor
time, so that a busy moment hits both, each after a call that is not timed. SQNR is of the logits or
features against the float model; memory is that of the quantized weights with all that they hold.
Packing for this machine, a step of its own here, is timed apart from quantizing. What torchao
refuses here is a row with its reason. `load` is the number of processes that wanted a core of the
machine in the last minute.
"""

import argparse
import copy
import os
import time
from collections.abc import Callable, Sequence
from statistics import mean, median, stdev
from typing import Any

import torch
from torch import Tensor, nn

import pt2e_quant as pq
from benchmarks.results import read_rows, write_results
from pt2e_quant.core.formats.scale_format import ScaleFormat
from pt2e_quant.core.scheme_names import scheme_named
from pt2e_quant.core.schemes import Scheme
from pt2e_quant.tensors import QuantizedTensor, pack_, quantize_

ROUNDS = 25
NAMES = ("int8_weight_only", "int8_dynamic", "int4_weight_only", "intx_weight_only",
         "float8_weight_only", "float8_dynamic")  # fmt: skip


def our_scheme(name: str) -> Scheme:
    """The scheme here that has the bits of a configuration of torchao."""
    if name == "int4_weight_only":
        return scheme_named("w4_g32", symmetric=False, scales=ScaleFormat(dtype=torch.bfloat16))
    ours = {
        "int8_weight_only": "w8",
        "int8_dynamic": "int8_dynamic",
        "intx_weight_only": "w4_g32",
        "float8_weight_only": "fp8_weight_only",
        "float8_dynamic": "fp8_dynamic",
    }
    return scheme_named(ours[name])


def their_config(name: str) -> Any:
    """The configuration of torchao 0.18."""
    from torchao import quantization as ao
    from torchao.quantization.granularity import PerGroup, PerRow

    made: dict[str, Callable[[], Any]] = {
        "int8_weight_only": ao.Int8WeightOnlyConfig,
        "int8_dynamic": ao.Int8DynamicActivationInt8WeightConfig,
        "int4_weight_only": lambda: ao.Int4WeightOnlyConfig(
            group_size=32, int4_packing_format="plain_int32"
        ),
        "intx_weight_only": lambda: ao.IntxWeightOnlyConfig(
            weight_dtype=getattr(torch, "int4"),  # noqa: B009  # torch's stubs do not list it
            granularity=PerGroup(32),
        ),
        "float8_weight_only": ao.Float8WeightOnlyConfig,
        "float8_dynamic": lambda: ao.Float8DynamicActivationFloat8WeightConfig(
            granularity=PerRow()
        ),
    }
    return made[name]()


def models(seed: int = 0) -> dict[str, tuple[nn.Module, tuple[Tensor, ...]]]:
    """Seeded models with the sizes of a small Llama, MiniLM and a ViT, with example inputs."""
    from transformers import (
        BertConfig,
        BertModel,
        LlamaConfig,
        LlamaForCausalLM,
        ViTConfig,
        ViTModel,
    )

    torch.manual_seed(seed)
    llama = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=512,
            intermediate_size=1376,
            num_hidden_layers=4,
            num_attention_heads=8,
            num_key_value_heads=4,
            vocab_size=2048,
            use_cache=False,
        )
    )
    bert = BertModel(
        BertConfig(
            hidden_size=384,
            intermediate_size=1536,
            num_hidden_layers=6,
            num_attention_heads=12,
            vocab_size=4096,
        )
    )
    vit = ViTModel(
        ViTConfig(
            hidden_size=384,
            intermediate_size=1536,
            num_hidden_layers=6,
            num_attention_heads=6,
            image_size=112,
        )
    )
    tokens = torch.randint(0, 2048, (1, 64))
    return {
        "llama": (First(llama.eval()), (tokens,)),
        "llama_1_token": (First(copy.deepcopy(llama).eval()), (tokens[:, :1],)),
        "minilm": (First(bert.eval()), (tokens,)),
        "vit": (First(vit.eval()), (torch.randn(1, 3, 112, 112),)),
    }


class First(nn.Module):
    """A model of transformers reduced to one input and its first result."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        """The logits, or the last hidden state."""
        found: Tensor = self.model(x, return_dict=False)[0]
        return found


def stored_bytes(tensor: Tensor) -> int:
    """Bytes of a tensor, of a subclass those of all its parts."""
    if isinstance(tensor, QuantizedTensor):
        return tensor.nbytes
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        return sum(stored_bytes(getattr(tensor, name)) for name in names)
    return tensor.numel() * tensor.element_size()


def linear_bytes(model: nn.Module) -> int:
    """Bytes of the weights of linears."""
    linears = (m for m in model.modules() if isinstance(m, nn.Linear))
    return sum(stored_bytes(linear.weight) for linear in linears)


def time_in_turn(calls: Sequence[Callable[[], Any]], rounds: int) -> list[float]:
    """Median processor milliseconds of each call, made in turn."""
    times: list[list[float]] = [[] for _ in calls]
    for call in calls:
        call()
        call()
    for _ in range(rounds):
        for own, call in zip(times, calls, strict=True):
            call()  # whose weights are in the caches then, as in a run of tokens
            start = time.thread_time()
            call()
            own.append(time.thread_time() - start)
    return [median(own) * 1e3 for own in times]


def quantized(model: nn.Module, how: Callable[[nn.Module], Any]) -> tuple[nn.Module, float]:
    """A quantized copy, and the milliseconds that quantizing took."""
    made = copy.deepcopy(model)
    start = time.perf_counter()
    how(made)
    return made, (time.perf_counter() - start) * 1e3


def measure(
    name: str, model: nn.Module, inputs: tuple[Tensor, ...], *, compiled: bool, rounds: int
) -> dict[str, object]:
    """One row: a configuration on a model."""
    from torchao.quantization import quantize_ as their_quantize_

    expected = model(*inputs)
    ours, our_ms = quantized(model, lambda m: quantize_(m, our_scheme(name), layout="plain"))
    start = time.perf_counter()
    pack_(ours)
    pack_ms = (time.perf_counter() - start) * 1e3
    row: dict[str, object] = {
        "config": name,
        "ours_sqnr_db": round(pq.sqnr_db([expected], [ours(*inputs)]), 2),
        "ours_bytes": linear_bytes(ours),
        "ours_quantize_ms": round(our_ms, 1),
        "ours_pack_ms": round(pack_ms, 1),
    }
    try:
        theirs, their_ms = quantized(model, lambda m: their_quantize_(m, their_config(name)))
        found = theirs(*inputs)
    except Exception as error:  # whatever torchao raises where it has no kernel
        row["torchao"] = refusal(error)
        row["ours_ms"], row["float_ms"] = (
            round(t, 3)
            for t in time_in_turn([lambda: ours(*inputs), lambda: model(*inputs)], rounds)
        )
        return row
    runs = {"float": model, "ours": ours, "torchao": theirs}
    if compiled:
        torch._dynamo.reset()  # else torch leaves the fourth configuration eager: a limit of 8
        runs = {key: torch.compile(value) for key, value in runs.items()}
    times = time_in_turn([lambda m=m: m(*inputs) for m in runs.values()], rounds)
    row |= {f"{key}_ms": round(t, 3) for key, t in zip(runs, times, strict=True)}
    return row | {
        "torchao_sqnr_db": round(pq.sqnr_db([expected], [found]), 2),
        "torchao_bytes": linear_bytes(theirs),
        "torchao_quantize_ms": round(their_ms, 1),
        "ratio": round(times[1] / times[2], 3),
        "rounds": rounds,
        "load": round(os.getloadavg()[0], 1),
    }


def refusal(error: Exception) -> str:
    """What a row says of a configuration that torchao refuses."""
    reason = f"{type(error).__name__}: {error}".splitlines()[0][:120]
    return f"refused: {reason}"


def quantize_in_turn(name: str, label: str, model: nn.Module, rounds: int) -> dict[str, object]:
    """Median processor milliseconds of both `quantize_`, called in turn on copies of a model."""
    from torchao.quantization import quantize_ as their_quantize_

    ways: tuple[Callable[[nn.Module], Any], ...] = (
        lambda m: quantize_(m, our_scheme(name), layout="plain"),
        lambda m: their_quantize_(m, their_config(name)),
    )
    row: dict[str, object] = {"model": label, "config": f"{name}, quantize_"}
    try:
        their_quantize_(copy.deepcopy(model), their_config(name))
    except Exception as error:  # whatever torchao raises where it has no kernel
        return row | {"torchao": refusal(error)}
    times: list[list[float]] = [[], []]
    for round_ in range(rounds + 1):
        for own, how in zip(times, ways, strict=True):
            made = copy.deepcopy(model)
            start = time.thread_time()
            how(made)
            if round_:  # the first is to warm up
                own.append(time.thread_time() - start)
    ours, theirs = (median(own) * 1e3 for own in times)
    row |= {
        "rounds": rounds,
        "load": round(os.getloadavg()[0], 1),
        "ours_cpu_ms": round(ours, 2),
        "torchao_cpu_ms": round(theirs, 2),
        "ratio": round(ours / theirs, 3),
    }
    print(row, flush=True)
    return row


def sqnr_over_seeds(name: str, labels: Sequence[str], count: int) -> list[dict[str, object]]:
    """By how many dB we are nearer to float than torchao, over weights and inputs of each seed."""
    from torchao.quantization import quantize_ as their_quantize_

    found: dict[str, list[float]] = {label: [] for label in labels}
    for seed in range(count):
        for label, (model, inputs) in models(seed).items():
            if label in found:
                expected = model(*inputs)
                ours, _ = quantized(model, lambda m: quantize_(m, our_scheme(name)))
                theirs, _ = quantized(model, lambda m: their_quantize_(m, their_config(name)))
                ratios = [pq.sqnr_db([expected], [made(*inputs)]) for made in (ours, theirs)]
                found[label].append(ratios[0] - ratios[1])
    rows: list[dict[str, object]] = []
    for label, gains in found.items():
        error = stdev(gains) / len(gains) ** 0.5
        row = {"gain_db": round(mean(gains), 3), "standard_error_db": round(error, 3)}
        each = [round(gain, 2) for gain in gains]
        rows.append({"model": label, "config": f"{name}, {count} seeds", **row, "each": each})
        print(rows[-1], flush=True)
    return rows


def write_median(record: str, ending: str) -> None:
    """Write the median of all rows of configurations with an ending."""
    names = {f"{name}{ending}" for name in NAMES}
    rows = [r for r in read_rows(record) if r["config"] in names and "ratio" in r]
    ratios = [float(str(row["ratio"])) for row in rows]
    total = {"model": "all", "config": f"median{ending}", "ratio": round(median(ratios), 3)}
    write_results(record, [total | {"count": len(ratios)}], keys=("model", "config"))


def main() -> None:
    """Measure what is asked for and write it to `results/tensors.json`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--models", nargs="*")
    parser.add_argument("--configs", nargs="*", default=NAMES)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="timed calls of each")
    parser.add_argument("--seeds", type=int, default=0, help="compare SQNR alone, over so many")
    parser.add_argument("--quantize", type=int, default=0, help="time quantize_ alone, so often")
    parser.add_argument("--into", default="tensors", help="the name of the record")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    if asked.quantize:
        chosen = asked.models or ["llama", "minilm", "vit"]
        for label, (model, _) in models().items():
            for name in asked.configs if label in chosen else ():
                row = quantize_in_turn(name, label, model, asked.quantize)
                write_results(asked.into, [row], keys=("model", "config"))
        return
    if asked.seeds:
        labels = asked.models or ["llama", "llama_1_token", "minilm", "vit"]
        with torch.no_grad():
            every = [sqnr_over_seeds(name, labels, asked.seeds) for name in asked.configs]
        write_results(asked.into, [row for rows in every for row in rows], keys=("model", "config"))
        return
    with torch.no_grad():
        for label, (model, inputs) in models().items():
            if asked.models and label not in asked.models:
                continue
            for name in asked.configs:
                found = measure(name, model, inputs, compiled=asked.compiled, rounds=asked.rounds)
                row = {"model": label, **found}
                if asked.compiled:
                    row["config"] = f"{name}, compiled"
                print(row, flush=True)
                write_results(asked.into, [row], keys=("model", "config"))
    write_median(asked.into, ", compiled" if asked.compiled else "")


if __name__ == "__main__":
    main()
