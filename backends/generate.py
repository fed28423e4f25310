"""Text from an artifact of a decoder-only language model, token by token."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pt2e_quant.core.capture import Capture
from pt2e_quant.core.errors import InputError


def generate(
    run: Callable[[Tensor, Tensor], Any],
    capture: Capture,
    ids: Tensor,
    *,
    max_new_tokens: int,
    eos_token_id: int | None,
    temperature: float,
    seed: int,
) -> Tensor:
    """See `Artifact.generate`; `run` takes ids int64[1, T] and positions int64[T]."""
    longest, context = _limits(capture)
    _check(ids, context, max_new_tokens)
    generator = torch.Generator().manual_seed(seed)
    text = ids.to(torch.int64)
    place = 0
    for _ in range(max_new_tokens):
        for part in torch.split(text[:, place:], longest, dim=1):
            positions = torch.arange(place, place + part.shape[1])
            logits = run(part.contiguous(), positions)
            place += part.shape[1]
        token = _choose(logits[0, -1].float(), temperature, generator)
        text = torch.cat([text, token.reshape(1, 1)], dim=1)
        if eos_token_id is not None and int(token) == eos_token_id:
            break
    return text


def _choose(logits: Tensor, temperature: float, generator: torch.Generator) -> Tensor:
    if temperature == 0:
        return logits.argmax()
    return torch.multinomial((logits / temperature).softmax(0), 1, generator=generator)


def _limits(capture: Capture) -> tuple[int, int]:
    """The most tokens of one call, and how many the cache holds.

    Raises:
        InputError: the program is no language model with a cache of its own.
    """
    caches = [shape for shape in capture.state_shapes.values() if len(shape) == 4]
    if capture.arg_names != ("input_ids", "positions") or not caches:
        raise InputError(
            "generate is for programs of pq.export_causal_lm that keep their own cache; this one "
            f"takes ({', '.join(capture.arg_names)})",
            fix="program = pq.export_causal_lm(model, max_length=…), and quantize that",
        )
    size = capture.inputs[0].shape[1]
    longest = size if isinstance(size, int) else capture.dims[size].maximum
    context = min(shape[2] for shape in caches)
    return longest or context, context


def _check(ids: Tensor, context: int, max_new_tokens: int) -> None:
    if ids.dim() != 2 or ids.shape[0] != 1 or not ids.shape[1] or ids.is_floating_point():
        raise InputError(
            f"ids has shape {tuple(ids.shape)} and dtype {str(ids.dtype).removeprefix('torch.')}, "
            "expected int64[1, T] of one text",
            fix="tokenizer(text, return_tensors='pt').input_ids",
        )
    # The last token that is chosen is not given back to the model.
    needed = ids.shape[1] + max_new_tokens - 1
    if max_new_tokens < 1 or needed > context:
        raise InputError(
            f"{ids.shape[1]} tokens and {max_new_tokens} new ones, the cache holds {context}",
            fix=f"max_new_tokens=1 to {max(context - ids.shape[1] + 1, 0)}, or export with a "
            "greater max_length",
        )
