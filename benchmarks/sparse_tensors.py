"""What 2:4 pruning costs in quality, alone and with int8 and int4, on trained models.

    python -m benchmarks.sparse_tensors [--seeds 3] [--steps 600]

Digits by a perceptron of three linears (accuracy), a GPT of bytes (`benchmarks.lpt`) and a small
Llama (`benchmarks.llama_model`, perplexity of held-out text). Linears but the last are pruned, by
magnitude or with calibration data, without training after that; then quantized.
"""

import argparse
import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks import lpt
from benchmarks.algorithms_llm import Logits
from benchmarks.llama_model import TINY, Training, trained_llama
from benchmarks.llm_text import draw_windows, encode, read_sources
from benchmarks.qat import accuracy, digits, fit
from benchmarks.results import write_results
from pt2e_quant.tensors import QuantizedTensor, prune_2_4_, quantize_

console = Console(width=120)
SCHEMES = (None, "w8", "w4", "w4_g32")
PRUNINGS = ("dense", "magnitude", "with data")


@dataclass(frozen=True, slots=True)
class Subject:
    """A trained model, its calibration batches, and how it is judged."""

    model: nn.Module
    batches: list[Tensor]
    judge: Callable[[nn.Module], float]
    last: str


def digits_subject(seed: int) -> Subject:
    """A perceptron for digits; accuracy in per cent."""
    images, labels, test_images, test_labels = digits()
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(),
        nn.Linear(128, 10),
    )  # fmt: skip
    fit(model, images, labels, 12, 3e-3)
    batches = list(images[:512].split(64))
    return Subject(model, batches, lambda m: 100 * accuracy(m, test_images, test_labels), "5")


def gpt_subject(seed: int, steps: int) -> Subject:
    """A GPT of bytes; perplexity of a byte of held-out text."""
    text, held_out = lpt.texts()
    torch.manual_seed(seed)
    model = lpt.Gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lpt.RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lpt.RATE, steps, pct_start=0.1)
    draws = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        optimizer.zero_grad()
        lpt.loss_of(model, lpt.windows(text, lpt.BATCH, draws), False).backward()
        optimizer.step()
        schedule.step()
    ids = lpt.windows(held_out, 128, torch.Generator().manual_seed(0))
    batches = list(lpt.windows(text, 64, draws)[:, :-1].split(8))
    return Subject(model.eval(), batches, lambda m: math.exp(lpt.loss_of(m, ids, False)), "head")


def llama_subject(seed: int, steps: int) -> Subject:
    """A small Llama; perplexity of a token of held-out text."""
    trained = trained_llama(TINY, Training(steps=steps, tokens=128, seed=seed))
    own = encode(trained.tokenizer, read_sources().training[:12])
    held = draw_windows(trained.held_out, 32, 128, 0)

    def judge(model: nn.Module) -> float:
        logits = model(held)[:, :-1]
        return math.exp(F.cross_entropy(logits.flatten(0, 1), held[:, 1:].flatten()))

    batches = list(draw_windows(own, 32, 128, 1).split(4))
    return Subject(Logits(trained.model), batches, judge, "model.lm_head")


def measure(subject: Subject) -> dict[tuple[str, str | None], tuple[float, int]]:
    """What each way of pruning and scheme comes to: the judgement, and bytes of the linears."""

    def chosen(module: nn.Module, path: str) -> bool:
        return isinstance(module, nn.Linear) and path != subject.last

    found = {}
    for pruning in PRUNINGS:
        pruned = copy.deepcopy(subject.model)
        if pruning != "dense":
            data = subject.batches if pruning == "with data" else None
            prune_2_4_(pruned, data, filter=chosen)
        for scheme in SCHEMES:
            model = copy.deepcopy(pruned)
            if scheme is not None:
                layout = "plain" if scheme == "w8" else "packed"
                layout = layout if pruning == "dense" else "sparse_2_4"
                quantize_(model, scheme, filter=chosen, layout=layout, search="mse")
            weights = [m.weight for n, m in model.named_modules() if chosen(m, n)]
            kinds = (w.nbytes if isinstance(w, QuantizedTensor) else 4 * w.numel() for w in weights)
            with torch.no_grad():
                found[pruning, scheme] = subject.judge(model.eval()), sum(kinds)
    return found


def rows_of(name: str, figure: str, subjects: Sequence[Subject]) -> list[dict[str, object]]:
    """Means over seeds."""
    each = [measure(subject) for subject in subjects]
    rows: list[dict[str, object]] = []
    for pruning in PRUNINGS:
        for scheme in SCHEMES:
            values = [found[pruning, scheme][0] for found in each]
            size, dense = (each[0][key, scheme][1] for key in (pruning, "dense"))
            row: dict[str, object] = {"model": name, "pruning": pruning, "scheme": scheme}
            row |= {figure: round(mean(values), 3), "all": [round(v, 3) for v in values]}
            row |= {"linear_bytes": size, "of_dense": round(size / dense, 3)}
            rows.append(row)
            console.print(row)
    return rows


def main() -> None:
    """Measure what is asked for and write it to `results/sparse_tensors.json`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", default=["digits", "gpt", "llama"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=600)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    makers: dict[str, tuple[str, Callable[[int], Subject]]] = {
        "digits": ("accuracy", digits_subject),
        "gpt": ("perplexity", lambda seed: gpt_subject(seed, asked.steps)),
        "llama": ("perplexity", lambda seed: llama_subject(seed, asked.steps)),
    }
    for name in asked.only:
        figure, make = makers[name]
        rows = rows_of(name, figure, [make(seed) for seed in range(asked.seeds)])
        write_results("sparse_tensors", rows, ("model", "pruning", "scheme"))


if __name__ == "__main__":
    main()
