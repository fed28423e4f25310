"""Text for small language models: the standard library's own sources, which any machine has."""

import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

LEFT_OUT = {"site-packages", "test", "tests", "idlelib", "lib2to3", "encodings", "__pycache__"}
HELD_OUT_SHARE = 0.05


@dataclass(frozen=True, slots=True)
class Sources:
    """Texts to train on, and texts of other files to judge with."""

    training: tuple[str, ...]
    held_out: tuple[str, ...]


def read_sources(seed: int = 0) -> Sources:
    """Return the library's modules between 4 and 200 kB, a twentieth of them held out.

    Files are split in a seeded order of their names, so that one Python gives one split.

    Raises:
        FileNotFoundError: If this Python comes without its sources.
    """
    root = Path(sysconfig.get_path("stdlib"))
    paths = [
        path
        for path in sorted(root.rglob("*.py"))
        if not LEFT_OUT & set(path.relative_to(root).parts)
        and 4_000 <= path.stat().st_size <= 200_000
    ]
    if len(paths) < 100:
        raise FileNotFoundError(f"{root} holds {len(paths)} modules of 4 to 200 kB, expected 100")
    order = torch.randperm(len(paths), generator=torch.Generator().manual_seed(seed)).tolist()
    texts = [paths[index].read_text(encoding="utf-8", errors="replace") for index in order]
    count = round(len(texts) * HELD_OUT_SHARE)
    return Sources(training=tuple(texts[count:]), held_out=tuple(texts[:count]))


def train_tokenizer(texts: Sequence[str], vocabulary: int) -> Tokenizer:
    """Return a byte-level BPE tokenizer of `vocabulary` tokens; it can write any text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, texts: Sequence[str]) -> Tensor:
    """Return the tokens int64[count] of all texts, one after another."""
    return torch.tensor([token for row in tokenizer.encode_batch([*texts]) for token in row.ids])


def draw_windows(tokens: Tensor, count: int, length: int, seed: int) -> Tensor:
    """Return int64[count, length]: seeded windows of a token stream that do not overlap.

    Raises:
        ValueError: If the stream is too short for that many.
    """
    room = len(tokens) // length
    if count > room:
        raise ValueError(f"{len(tokens)} tokens hold {room} windows of {length}, {count} asked")
    chosen = torch.randperm(room, generator=torch.Generator().manual_seed(seed))[:count]
    return tokens[: room * length].view(room, length)[chosen]
