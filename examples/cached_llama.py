"""A Llama of `transformers` with its KV cache, ready for `torch.export` and any prompt length.

With state the cache is buffers that a call writes; artifacts keep them from call to call. Without,
the caller hands the cache in and gets the next one back.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from transformers import LlamaForCausalLM

Step = Callable[[Tensor, Tensor], Tensor]
"""Takes ids int64[1, T] and positions int64[T], gives logits float[1, T, vocabulary]."""


class _Slots:
    """What `transformers` needs of a cache once positions and mask are given: `update`."""

    def __init__(
        self, tensors: Sequence[Tensor], positions: Tensor, *, in_place: bool = False
    ) -> None:
        self.tensors = [*tensors]
        self.positions = positions
        self.in_place = in_place

    def update(self, keys: Tensor, values: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Put float[1, kv_heads, T, head_dim] where the tokens stand; return all slots."""
        for index, new in ((2 * layer, keys), (2 * layer + 1, values)):
            old = self.tensors[index]
            write = old.index_copy_ if self.in_place else old.index_copy
            self.tensors[index] = write(2, self.positions, new)
        return self.tensors[2 * layer], self.tensors[2 * layer + 1]


def _logits(model: LlamaForCausalLM, ids: Tensor, slots: _Slots) -> Tensor:
    positions = slots.positions
    context = slots.tensors[0].shape[2]
    seen = torch.arange(context, device=ids.device)[None, :] <= positions[:, None]
    return model(
        input_ids=ids,
        attention_mask=seen[None, None],
        position_ids=positions[None],
        past_key_values=slots,
        use_cache=True,
    ).logits


def empty_cache(model: LlamaForCausalLM, context: int) -> list[Tensor]:
    """Return keys and values of each layer in turn, float[1, kv_heads, context, head_dim]."""
    config = model.config
    shape = (1, config.num_key_value_heads, context, config.head_dim)
    return [torch.zeros(shape) for _ in range(2 * config.num_hidden_layers)]


class LlamaWithState(nn.Module):
    """Ids and positions in, logits out; the cache is buffers."""

    def __init__(self, model: LlamaForCausalLM, context: int) -> None:
        super().__init__()
        self.model = model
        for index, tensor in enumerate(empty_cache(model, context)):
            self.register_buffer(f"cache_{index}", tensor, persistent=False)

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """Return logits float[1, T, vocabulary] of ids int64[1, T] at positions int64[T]."""
        count = 2 * self.model.config.num_hidden_layers
        tensors = [getattr(self, f"cache_{index}") for index in range(count)]
        return _logits(self.model, input_ids, _Slots(tensors, positions, in_place=True))


class LlamaWithoutState(nn.Module):
    """Ids, positions and cache in, logits and the next cache out."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, input_ids: Tensor, positions: Tensor, cache: list[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        """Return logits as `LlamaWithState` does, and the cache with the new tokens in it."""
        slots = _Slots(cache, positions)
        return _logits(self.model, input_ids, slots), slots.tensors


def export_llama(
    model: LlamaForCausalLM, *, context: int, with_state: bool, longest: int = 64
) -> ExportedProgram:
    """Export with T, the tokens of one call, between 1 and `longest`."""
    ids, positions = torch.zeros(1, 5, dtype=torch.int64), torch.arange(5)
    tokens = Dim("tokens", min=1, max=longest)
    shapes: dict[str, object] = {"input_ids": {1: tokens}, "positions": {0: tokens}}
    if with_state:
        module: nn.Module = LlamaWithState(model, context)
        return torch.export.export(module, (ids, positions), dynamic_shapes=shapes)
    cache = empty_cache(model, context)
    shapes["cache"] = [None] * len(cache)
    module = LlamaWithoutState(model)
    return torch.export.export(module, (ids, positions, cache), dynamic_shapes=shapes)


def carry_cache(run: Callable[..., tuple[Tensor, list[Tensor]]], cache: list[Tensor]) -> Step:
    """Return a `Step` that hands each call the cache of the one before, starting with `cache`."""

    def step(ids: Tensor, positions: Tensor) -> Tensor:
        nonlocal cache
        logits, cache = run(ids, positions, cache)
        return logits

    return step
