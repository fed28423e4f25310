"""Decoder-only language models of `transformers`: export with a KV cache, and text from artifacts.

With state the cache is buffers that a call writes; artifacts keep them from call to call. Without,
the caller hands the cache in and gets the next one back.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from pt2e_quant.core.capture import Capture
from pt2e_quant.core.errors import InputError, UnsupportedError

Step = Callable[[Tensor, Tensor], Tensor]
"""Takes ids int64[1, T] and positions int64[T], gives logits float[1, T, vocabulary]."""

_TRIAL = 6
"""Tokens of the trial that compares the cached model with the model's own forward."""


def export_causal_lm(
    model: nn.Module,
    *,
    max_length: int,
    max_prompt: int | None = None,
    with_state: bool = True,
) -> ExportedProgram:
    """Export a decoder-only model of `transformers` so that it can be quantized and generate.

    The program takes `input_ids` int64[1, T] and their `positions` int64[T], and returns logits
    float[1, T, vocabulary]. Its KV cache, float[1, kv_heads, max_length, head_dim] for the keys and
    for the values of each layer, is buffers that a call writes; an artifact of it has
    `generate(ids, max_new_tokens=…)`.

    Args:
        model: a model with a language-modelling head, for example of
            `AutoModelForCausalLM.from_config`; its weights are shared, not copied.
        max_length: how many tokens the cache holds, prompt and answer together.
        max_prompt: the longest T of one call; `max_length`, at most 128, by default. `generate`
            gives longer prompts in several calls.
        with_state: False takes the cache as a third input, a list of tensors, and returns
            (logits, next cache): for callers that keep it themselves.

    Raises:
        InputError: no model of that kind, or lengths that are none.
        UnsupportedError: with a cache of fixed size this architecture computes something else than
            its own forward: its layers keep another kind of state.
    """
    _check(model, max_length, max_prompt)
    longest = min(max_prompt or 128, max_length)
    was_training = model.training
    model.eval()
    try:
        shapes = _cache_shapes(model)
        _check_against_forward(model, shapes)
        ids = torch.zeros(1, min(5, longest), dtype=torch.int64)
        positions = torch.arange(ids.shape[1])
        tokens = Dim("tokens", min=1, max=longest) if longest > 1 else None
        dims: dict[str, object] = {"input_ids": {1: tokens}, "positions": {0: tokens}}
        if with_state:
            module: nn.Module = _WithState(model, empty_cache(model, max_length))
            return torch.export.export(module, (ids, positions), dynamic_shapes=dims)
        cache = empty_cache(model, max_length)
        dims["cache"] = [None] * len(cache)
        return torch.export.export(
            _WithoutState(model), (ids, positions, cache), dynamic_shapes=dims
        )
    finally:
        model.train(was_training)


def empty_cache(model: nn.Module, max_length: int) -> list[Tensor]:
    """Keys and values of each layer in turn, zeros float[1, kv_heads, max_length, head_dim]."""
    dtype = next(model.parameters()).dtype
    return [
        torch.zeros(1, heads, max_length, size, dtype=dtype) for heads, size in _cache_shapes(model)
    ]


def carry_cache(run: Callable[..., tuple[Tensor, list[Tensor]]], cache: list[Tensor]) -> Step:
    """A `Step` that hands each call the cache of the one before, starting with `cache`."""

    def step(ids: Tensor, positions: Tensor) -> Tensor:
        nonlocal cache
        logits, cache = run(ids, positions, cache)
        return logits

    return step


class _Slots:
    """The interface of a cache that attention layers use once positions and mask are given."""

    is_compileable = False

    def __init__(
        self, tensors: Sequence[Tensor], positions: Tensor, *, in_place: bool = False
    ) -> None:
        self.tensors = [*tensors]
        self.positions = positions
        self.in_place = in_place

    def update(
        self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Put float[1, kv_heads, T, head_dim] where the tokens stand; return all slots."""
        for index, new in ((2 * layer, keys), (2 * layer + 1, values)):
            old = self.tensors[index]
            write = old.index_copy_ if self.in_place else old.index_copy
            self.tensors[index] = write(2, self.positions, new)
        return self.tensors[2 * layer], self.tensors[2 * layer + 1]

    def get_seq_length(self, *_: Any) -> int:
        """0: no layer needs it, because positions and mask are given."""
        return 0


def _cache_name(model: nn.Module) -> str:
    """The name of the cache among the model's arguments: from transformers 5.24 on `cache`."""
    names = inspect.signature(model.forward).parameters
    return "cache" if "cache" in names else "past_key_values"


def _logits(model: nn.Module, ids: Tensor, slots: _Slots, cache_name: str) -> Tensor:
    positions = slots.positions
    result = model(
        input_ids=ids,
        attention_mask=_mask(model, positions, slots.tensors[0]),
        position_ids=positions[None],
        use_cache=True,
        **{cache_name: slots},
    )
    logits: Tensor = result.logits
    return logits


def _mask(model: nn.Module, positions: Tensor, cache: Tensor) -> Any:
    """Return the slots that each token sees, [1, 1, T, max_length]; a dict where layers differ."""
    config: Any = model.config
    slots = torch.arange(cache.shape[2], device=positions.device)[None, :]
    seen = slots <= positions[:, None]
    window = getattr(config, "sliding_window", None)
    kinds = set(getattr(config, "layer_types", None) or ())
    if window is None:
        return _as_mask(model, seen, cache)
    near = seen & (slots > positions[:, None] - window)
    if "sliding_attention" in kinds and "full_attention" in kinds:
        return {
            "full_attention": _as_mask(model, seen, cache),
            "sliding_attention": _as_mask(model, near, cache),
        }
    is_full = bool(kinds) and "sliding_attention" not in kinds
    return _as_mask(model, seen if is_full else near, cache)


def _as_mask(model: nn.Module, seen: Tensor, cache: Tensor) -> Tensor:
    config: Any = model.config
    if getattr(config, "_attn_implementation", "") == "sdpa":
        return seen[None, None]
    # Written-out attention adds its mask to the scores.
    least = torch.finfo(cache.dtype).min
    return torch.where(seen, 0.0, least).to(cache.dtype)[None, None]


class _WithState(nn.Module):
    """Ids and positions in, logits out; the cache is buffers."""

    def __init__(self, model: nn.Module, cache: Sequence[Tensor]) -> None:
        super().__init__()
        self.model = model
        self.cache_name = _cache_name(model)
        self.count = len(cache)
        for index, tensor in enumerate(cache):
            self.register_buffer(f"cache_{index}", tensor, persistent=False)

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """Logits float[1, T, vocabulary] of ids int64[1, T] at positions int64[T]."""
        tensors = [getattr(self, f"cache_{index}") for index in range(self.count)]
        slots = _Slots(tensors, positions, in_place=True)
        return _logits(self.model, input_ids, slots, self.cache_name)


class _WithoutState(nn.Module):
    """Ids, positions and cache in, logits and the next cache out."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.cache_name = _cache_name(model)

    def forward(
        self, input_ids: Tensor, positions: Tensor, cache: list[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        """Logits as `_WithState` gives them, and the cache with the new tokens in it."""
        slots = _Slots(cache, positions)
        return _logits(self.model, input_ids, slots, self.cache_name), slots.tensors


def _check(model: nn.Module, max_length: int, max_prompt: int | None) -> None:
    config = getattr(model, "config", None)
    if config is None or not hasattr(config, "vocab_size"):
        raise InputError(
            f"export_causal_lm takes a language model of transformers, found "
            f"{type(model).__name__}",
            fix="AutoModelForCausalLM.from_pretrained(…)",
        )
    if getattr(config, "is_encoder_decoder", False):
        raise InputError(
            f"{type(model).__name__} has an encoder: export_causal_lm is for decoders alone",
            fix="torch.export.export the encoder and the decoder, each with its own inputs",
        )
    if max_length < 2 or (max_prompt is not None and not 1 <= max_prompt <= max_length):
        raise InputError(
            f"max_length is {max_length} and max_prompt {max_prompt}",
            fix="give 1 <= max_prompt <= max_length, and at least 2 tokens",
        )


def _cache_shapes(model: nn.Module) -> list[tuple[int, int]]:
    """(heads, head size) of the keys and of the values of each layer, as one call makes them."""
    ids = torch.zeros(1, 1, dtype=torch.int64, device=next(model.parameters()).device)
    try:
        with torch.no_grad():
            past = getattr(model(input_ids=ids, use_cache=True), _cache_name(model), None)
    except Exception as error:  # some architectures take more, or cannot make a cache themselves
        raise _no_cache(model, f"{type(error).__name__}: {error}") from error
    layers: Sequence[Any] = getattr(past, "layers", None) or ()
    shapes: list[tuple[int, int]] = []
    for layer in layers:
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if not (isinstance(keys, Tensor) and isinstance(values, Tensor) and keys.dim() == 4):
            raise _no_cache(model, f"a layer of it keeps a {type(layer).__name__}")
        shapes += [(t.shape[1], t.shape[3]) for t in (keys, values)]
    if not shapes:
        raise _no_cache(model, f"it returns no {_cache_name(model)} with keys and values")
    return shapes


def _check_against_forward(model: nn.Module, shapes: Sequence[tuple[int, int]]) -> None:
    """Compare two calls on a cache with one call without."""
    config: Any = model.config
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, config.vocab_size, (1, _TRIAL), generator=generator)
    dtype = next(model.parameters()).dtype
    cache = [torch.zeros(1, heads, _TRIAL + 2, size, dtype=dtype) for heads, size in shapes]
    trial = _WithState(model, cache)
    half = _TRIAL // 2
    try:
        with torch.no_grad():
            expected = model(input_ids=ids, use_cache=False).logits
            parts = [
                trial(ids[:, part], torch.arange(_TRIAL)[part])
                for part in (slice(0, half), slice(half, _TRIAL))
            ]
    except Exception as error:  # whatever the architecture asks of a cache that this one has not
        raise _no_cache(model, f"{type(error).__name__}: {error}") from error
    found = torch.cat(parts, dim=1)
    error_of = float((found - expected).abs().max())
    if error_of > 1e-3 * max(1.0, float(expected.abs().max())):
        raise _no_cache(model, f"its logits differ by {error_of:.3g}")


def _no_cache(model: nn.Module, reason: str) -> UnsupportedError:
    return UnsupportedError(
        f"{type(model).__name__} does not run on a KV cache of fixed size: {reason}",
        fix="torch.export.export(model, …) of a module of your own that takes and returns its "
        "state",
    )


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
    """Text from an artifact, token by token; see `Artifact.generate`.

    `run` takes ids int64[1, T] and positions int64[T].
    """
    longest, context = _limits(capture)
    _check_request(ids, context, max_new_tokens)
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


def _check_request(ids: Tensor, context: int, max_new_tokens: int) -> None:
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
