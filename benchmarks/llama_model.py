"""A small Llama trained here, in minutes on one thread, on the standard library's sources.

The trained weights are kept in `build/llama`, which git ignores, under a name made of everything
that they depend on; where they are missing they are trained again, from the same seed.
"""

import hashlib
import json
import platform
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from rich.progress import track
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.llm_text import encode, read_sources, train_tokenizer

CACHE = Path(__file__).resolve().parents[1] / "build" / "llama"


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaShape:
    """The sizes of a Llama; by default 7.1 M parameters with grouped-query attention."""

    layers: int = 4
    width: int = 384
    heads: int = 6
    kv_heads: int = 2
    intermediate: int = 1024
    vocabulary: int = 2048
    context: int = 256
    is_tied: bool = True

    def config(self) -> LlamaConfig:
        """Return the shape in transformers' words."""
        return LlamaConfig(
            num_hidden_layers=self.layers,
            hidden_size=self.width,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            intermediate_size=self.intermediate,
            vocab_size=self.vocabulary,
            max_position_embeddings=self.context,
            tie_word_embeddings=self.is_tied,
            initializer_range=self.width**-0.5,
            bos_token_id=None,
            eos_token_id=None,
        )


TINY = LlamaShape(layers=2, width=128, heads=4, kv_heads=2, intermediate=256, vocabulary=512)
"""A few tenths of a million parameters: trained in seconds, for tests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """How a model is trained: AdamW, one cycle of the learning rate."""

    steps: int = 600
    rows: int = 4
    tokens: int = 256
    learning_rate: float = 3e-3
    seed: int = 0


BRIEF = Training(steps=60, tokens=128)
"""Seconds on `TINY`: far better than chance, not good."""


@dataclass(frozen=True, slots=True)
class TrainedLlama:
    """A model in eval mode, its tokenizer, and tokens int64[count] of texts it never saw."""

    model: LlamaForCausalLM
    tokenizer: Tokenizer
    held_out: Tensor = field(repr=False)


def trained_llama(
    shape: LlamaShape | None = None,
    training: Training | None = None,
    *,
    cache: Path = CACHE,
) -> TrainedLlama:
    """Return a trained model, from `cache` if it is there.

    Args:
        shape: The model's sizes.
        training: How long and from which seed.
        cache: The folder to keep the weights and the tokenizer in.
    """
    shape, training = shape or LlamaShape(), training or Training()
    sources = read_sources()
    text = json.dumps([asdict(shape), asdict(training), platform.python_version()])
    name = hashlib.sha256(text.encode()).hexdigest()[:12]
    weights, vocabulary = cache / f"{name}.safetensors", cache / f"{name}.tokenizer.json"
    if vocabulary.exists():
        tokenizer = Tokenizer.from_file(str(vocabulary))
    else:
        cache.mkdir(parents=True, exist_ok=True)
        tokenizer = train_tokenizer(sources.training, shape.vocabulary)
        tokenizer.save(str(vocabulary))
    model = random_llama(shape, training.seed)
    if weights.exists():
        # a tied matrix is stored once, under the embedding's name
        model.load_state_dict(load_file(weights), strict=not shape.is_tied)
    else:
        fit(model, encode(tokenizer, sources.training), training)
        state = {k: v for k, v in model.state_dict().items() if k in dict(model.named_parameters())}
        partial = weights.with_suffix(".partial")
        save_file(state, partial)
        partial.rename(weights)
    return TrainedLlama(model.eval(), tokenizer, encode(tokenizer, sources.held_out))


def random_llama(shape: LlamaShape, seed: int = 0) -> LlamaForCausalLM:
    """Return a seeded model in eval mode that has learnt nothing."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(shape.config()).eval()


@torch.enable_grad()
def fit(model: LlamaForCausalLM, tokens: Tensor, training: Training) -> float:
    """Train on random windows of a token stream; return the last steps' mean loss in nats."""
    generator = torch.Generator().manual_seed(training.seed)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, training.learning_rate, total_steps=training.steps, pct_start=0.1
    )
    model.train()
    losses = []
    offsets = torch.arange(training.tokens + 1)
    for _ in track(range(training.steps), description="training a Llama"):
        starts = torch.randint(len(tokens) - len(offsets), (training.rows, 1), generator=generator)
        batch = tokens[starts + offsets]
        logits = model(input_ids=batch[:, :-1], use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    model.eval()
    last = losses[-20:]
    return sum(last) / len(last)
