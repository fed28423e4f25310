"""Train a byte-level Llama for seconds, store its weights in 4 bits, run both files byte by byte.

Run `python examples/llm_w4.py`: about a minute on one core. The exit status is 1 if 4 bits cost
more than 5 % of perplexity on either runtime.
"""

import argparse
import sys
import sysconfig
import tempfile
import warnings
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

import pt2e_quant as pq
from pt2e_quant.flow.causal_lm import Step, export_causal_lm

MAX_PERPLEXITY_RATIO = 1.05
RECIPES = {"xnnpack": "a8w4_g32", "onnx": "w4_g32"}
CONTEXT, PROMPT, WINDOWS = 96, 32, 8
console = Console()
# torch 2.13 warns about its own pytree code at each export
warnings.filterwarnings("ignore", message=".*LeafSpec.*", category=FutureWarning)


def read_bytes() -> tuple[Tensor, Tensor]:
    """Return int64 bytes of the standard library: to train on, and of three other modules."""
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    judged = [path for path in paths if path.stem in ("heapq", "textwrap", "queue")]
    texts = (b"".join(p.read_bytes() for p in paths if p not in judged), judged[-1].read_bytes())
    training, held_out = (torch.frombuffer(bytearray(text), dtype=torch.uint8) for text in texts)
    return training.long(), held_out.long()


def train_llama(text: Tensor, steps: int) -> LlamaForCausalLM:
    """Return a two-layer Llama of 0.4 M parameters, tied, with two queries to each key."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "hidden_size": 128, "intermediate_size": 384}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, tie_word_embeddings=True))
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-3, total_steps=steps)
    for _ in track(range(steps), description="training"):
        starts = torch.randint(len(text) - CONTEXT - 1, (16, 1))
        batch = text[starts + torch.arange(CONTEXT + 1)]
        logits = model(input_ids=batch[:, :-1], use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return model.eval()


def perplexity(step: Step, text: Tensor) -> float:
    """Return e to the mean loss a byte: prompts at once, the rest byte by byte."""
    losses = []
    for window in text[: WINDOWS * CONTEXT].view(WINDOWS, CONTEXT):
        logits = [step(window[None, :PROMPT], torch.arange(PROMPT))[0]]
        for place in range(PROMPT, CONTEXT):
            logits.append(step(window[None, place : place + 1], torch.tensor([place]))[0].clone())
        losses.append(F.cross_entropy(torch.cat(logits)[:-1], window[1:]))
    return float(torch.stack(losses).mean().exp())


def quantize(model: LlamaForCausalLM, name: str, folder: Path) -> tuple[Step, int]:
    """Return a file's step and its bytes; no calibration: weights need no data."""
    backend = pq.backends.get(name)
    sample = (torch.arange(PROMPT)[None], torch.arange(PROMPT))
    ep = export_causal_lm(model, max_length=CONTEXT, with_state=True)
    prepared = pq.prepare_pt2e(ep, backend.quantizer(RECIPES[name]))
    path = folder / f"llama_w4{backend.suffix}"
    backend.lower(pq.convert_pt2e(prepared), sample).save(path)
    return backend.load(path).run, path.stat().st_size


def main(steps: int, folder: Path) -> bool:
    """Train, quantize, compare; return whether 4 bits kept the perplexity."""
    torch.set_num_threads(1)
    training, held_out = read_bytes()
    model = train_llama(training, steps)
    with torch.no_grad():
        before = perplexity(
            export_causal_lm(model, max_length=CONTEXT, with_state=True).module(), held_out
        )
    parameters = sum(p.numel() for p in model.parameters())
    table = Table("runtime", "recipe", "perplexity", "in 4 bits", "KiB", "bits a parameter")
    kept = True
    for name, recipe in RECIPES.items():
        console.print(f"quantizing for {name}")
        step, size = quantize(model, name, folder)
        after = perplexity(step, held_out)
        kept &= after <= MAX_PERPLEXITY_RATIO * before
        bits = f"{8 * size / parameters:.1f}"
        table.add_row(name, recipe, f"{before:.3f}", f"{after:.3f}", f"{size / 1024:.0f}", bits)
    console.print(table)
    return kept


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--keep", type=Path, help="an existing folder to leave the files in")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        ok = main(options.steps, options.keep or Path(temporary))
    sys.exit(0 if ok else "4 bits cost more perplexity than they may")
