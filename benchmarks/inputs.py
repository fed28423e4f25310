"""Seeded inputs: 1/f-noise images and tokenized English sentences."""

import ast
import importlib
import inspect

import torch
from torch import Tensor

# Modules of the standard library whose docstrings give plain English sentences.
DOCSTRING_MODULES = (
    "argparse",
    "asyncio.locks",
    "bisect",
    "collections",
    "configparser",
    "contextlib",
    "csv",
    "datetime",
    "decimal",
    "email.message",
    "fractions",
    "heapq",
    "http.client",
    "json",
    "logging",
    "random",
    "shutil",
    "statistics",
    "tempfile",
    "textwrap",
    "threading",
    "urllib.request",
    "zipfile",
)

CONTRAST_SIGMA = 0.5
"""Spread of the logarithm of an image's contrast."""


def noise_images(count: int, size: int, generator: torch.Generator) -> Tensor:
    """Return float[count, 3, size, size] with a 1/f amplitude spectrum, like natural images.

    Each image has mean 0 and a contrast (standard deviation) of its own, log-normal around 1, as
    photographs have: a few held-out images exceed every range that calibration saw.
    """
    rows = torch.fft.fftfreq(size)[:, None]
    columns = torch.fft.rfftfreq(size)[None, :]
    frequency = torch.sqrt(rows**2 + columns**2)
    frequency[0, 0] = 1.0
    white = torch.randn(count, 3, size, size, generator=generator)
    images = torch.fft.irfft2(torch.fft.rfft2(white) / frequency, s=(size, size))
    mean = images.mean(dim=(1, 2, 3), keepdim=True)
    std = images.std(dim=(1, 2, 3), keepdim=True)
    contrast = torch.exp(CONTRAST_SIGMA * torch.randn(count, 1, 1, 1, generator=generator))
    return (images - mean) / std * contrast


def image_batches(count: int, size: int, seed: int) -> list[tuple[Tensor]]:
    """Return `count` batches of one image each."""
    images = noise_images(count, size, torch.Generator().manual_seed(seed))
    return [(image[None],) for image in images]


def docstring_sentences(count: int, seed: int) -> list[str]:
    """Return `count` different sentences from docstrings of the standard library.

    Lengths vary from 5 to 60 words, so that padded batches hold short and long rows.
    """
    found: list[str] = []
    for name in DOCSTRING_MODULES:
        source = inspect.getsource(importlib.import_module(name))
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                found += sentences_of(ast.get_docstring(node) or "")
    unique = sorted(set(found))
    order = torch.randperm(len(unique), generator=torch.Generator().manual_seed(seed))
    if count > len(unique):
        raise ValueError(f"{count} sentences asked, the standard library gave {len(unique)}")
    return [unique[index] for index in order[:count].tolist()]


def sentences_of(docstring: str) -> list[str]:
    """Return the plain sentences of a docstring: no markup, no code, 5 to 60 words."""
    sentences = []
    for paragraph in docstring.split("\n\n"):
        text = " ".join(paragraph.split())
        if any(mark in text for mark in (">>>", "::", "->", "==", "--", "<", "|", "_", "{")):
            continue
        for part in text.replace("? ", ". ").split(". "):
            words = part.rstrip(".").split()
            if 5 <= len(words) <= 60 and words[0][0].isupper():
                sentences.append(" ".join(words) + ".")
    return sentences
