"""How well a language model's file predicts text it never saw, and how near its logits are."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaForCausalLM

from benchmarks.measure import sqnr_db
from pt2e_quant.flow.causal_lm import Step


@dataclass(frozen=True, slots=True)
class LanguageQuality:
    """Figures of one program over all windows together."""

    perplexity: float
    sqnr_db: float
    same_choice: float
    """The share of tokens where float and file find the same next token most likely."""


def predict(step: Step, window: Tensor, prompt: int) -> Tensor:
    """Return logits float[T, vocabulary]: the first `prompt` tokens at once, then one by one.

    Args:
        step: The program; what it kept of an earlier window must not matter.
        window: Ids int64[T].
        prompt: How many tokens the first call takes.
    """
    logits = [step(window[None, :prompt], torch.arange(prompt))]
    for place in range(prompt, len(window)):
        logits.append(step(window[None, place : place + 1], torch.tensor([place])))
    return torch.cat(logits, dim=1)[0]


@torch.no_grad()
def float_logits(model: LlamaForCausalLM, windows: Tensor) -> list[Tensor]:
    """Return the float module's logits, one float[T, vocabulary] a window, without a cache."""
    return [model(input_ids=window[None], use_cache=False).logits[0] for window in windows]


def perplexity(logits: Sequence[Tensor], windows: Tensor) -> float:
    """Return e to the mean loss of each window's tokens but the first."""
    losses = [
        F.cross_entropy(row[:-1], window[1:], reduction="none")
        for row, window in zip(logits, windows, strict=True)
    ]
    return float(torch.cat(losses).double().mean().exp())


def judge(step: Step, windows: Tensor, reference: Sequence[Tensor], prompt: int) -> LanguageQuality:
    """Run a program over windows int64[count, T] and compare with the float logits."""
    found = [predict(step, window, prompt) for window in windows]
    same = torch.cat([a.argmax(-1) == b.argmax(-1) for a, b in zip(reference, found, strict=True)])
    return LanguageQuality(
        perplexity=perplexity(found, windows),
        sqnr_db=sqnr_db(reference, found),
        same_choice=float(same.double().mean()),
    )
