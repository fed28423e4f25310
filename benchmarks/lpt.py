"""Does training in low precision end where bfloat16 and float32 do, and in what memory?

Run `python -m benchmarks.lpt` (`--only gpt digits traffic`). A small GPT reads
the bytes of Python's standard library; every arm starts from the same weights and sees the same
batches. Losses are those of held-out text after the last step.
"""

import argparse
import copy
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from benchmarks.llm_text import read_sources
from benchmarks.qat import accuracy, digits, digits_net
from benchmarks.results import write_results
from pt2e_quant import training
from pt2e_quant.core.formats.format_schemes import code_book_scheme
from pt2e_quant.core.formats.number_formats import CodeBook
from pt2e_quant.core.granularity import PerChannel

console = Console(width=120)
GOALS = {"gpt beside bf16": 0.01, "gpt beside fp32": 0.02, "digits": 0.5}
CONTEXT, BATCH, RATE = 64, 8, 2e-3

LEVELS = [((1 + 15) ** (i / 127) - 1) / 15 for i in range(1, 128)]
OWN_TABLE = CodeBook(
    name="mu_law_uint8", bits=8, values=(*(-v for v in reversed(LEVELS)), 0.0, *LEVELS)
)
"""A format of a user's own: 255 values that are denser near 0."""


class Block(nn.Module):
    """Attention and a feed-forward layer, each behind a layer norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output for [batch, tokens, width]."""
        batch, tokens, width = x.shape
        parts = self.qkv(self.norms[0](x)).view(batch, tokens, 3, self.heads, -1)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class Gpt(nn.Module):
    """A language model of bytes."""

    def __init__(self, width: int = 128, layers: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, width)
        self.places = nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits for [batch, tokens]."""
        x = self.bytes(ids) + self.places(torch.arange(ids.shape[1]))
        return self.head(self.norm(self.blocks(x)))


@dataclass(frozen=True)
class Arm:
    """One way to train."""

    convert: Callable[[nn.Module], object] = lambda model: None
    optimizer: Callable[[nn.Module, float], Optimizer] = lambda model, lr: torch.optim.AdamW(
        model.parameters(), lr=lr
    )
    is_autocast: bool = True
    after: Callable[[nn.Module], None] = lambda model: None
    beside: str = "bf16"


def of_parameters(optimizer_class: type[Optimizer]) -> Callable[[nn.Module, float], Optimizer]:
    """Return what makes an optimizer for a model."""
    return lambda model, lr: optimizer_class(model.parameters(), lr=lr)


def float8_arm(**settings: object) -> Arm:
    """Return an arm that trains all linears but the head in float8."""
    config = training.Float8TrainingConfig(**settings)
    convert = partial(
        training.convert_to_float8_training, config=config, filter=lambda m, name: name != "head"
    )
    is_delayed = config.amax_history is not None
    after = training.update_float8_scales if is_delayed else lambda model: None
    return Arm(convert=convert, after=after)


def stored_arm(scheme: object, rounding: str = "nearest") -> Arm:
    """Return an arm whose weights are stored in a format, with bf16 gradients."""
    return Arm(
        convert=lambda model: training.quantize_parameters(
            model, scheme, grad_dtype=torch.bfloat16, rounding=rounding
        ),
        optimizer=lambda model, lr: training.with_master_weights(torch.optim.AdamW, model, lr=lr),
        is_autocast=False,
        beside="fp32",
    )


ARMS = {
    "bf16": Arm(),
    "fp32": Arm(is_autocast=False, beside="fp32"),
    "float8 tensorwise": float8_arm(),
    "float8 rowwise": float8_arm(scaling="rowwise"),
    "float8 blockwise": float8_arm(scaling="blockwise"),
    "float8 delayed": float8_arm(amax_history=16),
    "int8": Arm(
        convert=partial(
            training.convert_to_int8_training, filter=lambda module, name: name != "head"
        )
    ),
    "AdamW8bit": Arm(optimizer=of_parameters(training.AdamW8bit)),
    "AdamW4bit": Arm(optimizer=of_parameters(training.AdamW4bit)),
    "stored int8 rows": stored_arm("w8"),
    "stored own table": stored_arm(code_book_scheme(OWN_TABLE, PerChannel(axis=0))),
    "stored int8 rows, stochastic": stored_arm("w8", "stochastic"),
}


def texts() -> tuple[Tensor, Tensor]:
    """Return bytes to train on and to judge with."""
    sources = read_sources()

    def joined(parts: tuple[str, ...], limit: int) -> Tensor:
        return torch.tensor(list("\n".join(parts).encode()[:limit]))

    return joined(sources.training, 2_000_000), joined(sources.held_out, 200_000)


def windows(text: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Return `count` runs of bytes, one longer than the context."""
    starts = torch.randint(len(text) - CONTEXT - 1, (count,), generator=generator)
    return torch.stack([text[start : start + CONTEXT + 1] for start in starts])


def loss_of(model: nn.Module, ids: Tensor, is_autocast: bool) -> Tensor:
    """Return the mean loss of the next byte."""
    with torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
        logits = model(ids[:, :-1])
    return F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())


def train_gpt(name: str, steps: int, seed: int) -> dict[str, object]:
    """Return the loss, memory and time of one arm."""
    arm, (text, held_out) = ARMS[name], texts()
    torch.manual_seed(seed)
    model = Gpt()
    arm.convert(model)
    optimizer = arm.optimizer(model, RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, steps, pct_start=0.1)
    batches = torch.Generator().manual_seed(seed)
    started = time.process_time()
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(model, windows(text, BATCH, batches), arm.is_autocast).backward()
        optimizer.step()
        schedule.step()
        arm.after(model)
    seconds = time.process_time() - started
    ids = windows(held_out, 256, torch.Generator().manual_seed(0))
    with torch.no_grad():
        loss = loss_of(model.eval(), ids, arm.is_autocast).item()
    stored = sum(param.nbytes for param in model.parameters())
    return {
        "arm": name,
        "seed": seed,
        "steps": steps,
        "loss": round(loss, 4),
        "parameter_bytes": stored,
        "state_bytes": training.state_bytes(optimizer),
        "cpu_seconds_a_step": round(seconds / steps, 4),
    }


def run_gpt(steps: int, seeds: int, arms: list[str]) -> list[dict[str, object]]:
    """Train all arms and compare each with its baseline."""
    rows = []
    for seed in range(seeds):
        losses: dict[str, float] = {}
        for name in dict.fromkeys(["bf16", "fp32", *arms]):
            row = train_gpt(name, steps, seed)
            losses[name] = float(str(row["loss"]))
            beside = ARMS[name].beside
            row["beside"] = beside
            row["above"] = round(losses[name] / losses[beside] - 1, 4)
            row["goal"] = GOALS[f"gpt beside {beside}"]
            rows.append({"part": "gpt"} | row)
            console.print(rows[-1])
    return rows


def train_digits(name: str, epochs: int, seed: int) -> float:
    """Return the accuracy of the digits CNN after training, in per cent."""
    arm = ARMS[name]
    images, labels, test_images, test_labels = digits()
    model = digits_net()
    torch.manual_seed(seed)
    for layer in model:
        if hasattr(layer, "reset_parameters"):
            layer.reset_parameters()
    arm.convert(model)
    optimizer = arm.optimizer(model, 5e-3)
    order = torch.Generator().manual_seed(seed)
    for epoch in range(epochs):
        for group in optimizer.param_groups:
            group["lr"] = 5e-3 * 0.1 ** (epoch / max(1, epochs - 1))
        for batch in torch.randperm(len(images), generator=order).split(64):
            optimizer.zero_grad()
            F.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
    return 100 * accuracy(copy.deepcopy(model).eval(), test_images, test_labels)


def run_digits(epochs: int, seeds: int) -> list[dict[str, object]]:
    """Train the CNN with weights stored in formats, and in float32."""
    rows = []
    for name in ("fp32", "stored int8 rows", "stored own table"):
        found = [round(train_digits(name, epochs, seed), 2) for seed in range(seeds)]
        mean = sum(found) / len(found)
        base = mean if name == "fp32" else rows[0]["accuracy"]
        row = {"part": "digits", "arm": name, "seed": -1, "accuracy": round(mean, 2)}
        row |= {"all": found, "below": round(base - mean, 2), "goal": GOALS["digits"]}
        rows.append(row)
        console.print(row)
    return rows


def run_traffic() -> list[dict[str, object]]:
    """Count the bytes that a step's casts move, beside those of its products in bfloat16.

    Of the GPT's linears at 4096 tokens. A cast reads a tensor for its amax, reads it again and
    writes codes; delayed scaling reads it once. Weights are float32 and cast in both passes.
    """
    linears = [m for m in Gpt().modules() if isinstance(m, nn.Linear)][:-1]
    rows, M = [], 4096
    for name, reads, casts in (("tensorwise", 2, 1), ("delayed", 1, 1), ("rowwise", 2, 2)):
        moved = products8 = products16 = 0
        for linear in linears:
            N, K = linear.weight.shape
            moved += casts * (2 * reads + 1) * (M * K + M * N) + 2 * (4 * reads + 1) * N * K
            elements = 2 * (M * K + N * K + M * N)
            written = 2 * (M * N + M * K + N * K)
            products8 += elements + written
            products16 += 2 * elements + written
        row = {"part": "traffic", "arm": name, "seed": -1}
        row |= {"cast_bytes": moved, "float8_product_bytes": products8}
        row |= {"bf16_product_bytes": products16}
        row["ratio"] = round((moved + products8) / products16, 2)
        rows.append(row)
        console.print(row)
    return rows


def main() -> None:
    """Run what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", default=["traffic", "digits", "gpt"])
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--seeds", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(1)
    parts = {
        "traffic": run_traffic,
        "digits": lambda: run_digits(options.epochs, options.seeds),
        "gpt": lambda: run_gpt(options.steps, options.seeds, options.arms),
    }
    for part in options.only:
        rows = parts[part]()
        console.print(write_results("low_precision_training", rows, ("part", "arm", "seed")))


if __name__ == "__main__":
    main()
