"""The form of a quantized tensor, its numbers aside: scheme, real dtype, shape, axes, layout."""

import json
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import torch

from pt2e_quant.core.errors import ConfigError
from pt2e_quant.core.formats.blocks import block_lengths
from pt2e_quant.core.formats.number_formats import CodeBook, float_format
from pt2e_quant.core.formats.scale_format import ScaleFormat
from pt2e_quant.core.granularity import (
    Granularity,
    PerBlock,
    PerChannel,
    PerGroup,
    PerRow,
    PerTensor,
    PerToken,
)
from pt2e_quant.core.schemes import TensorScheme

_GRANULARITIES: dict[str, type[Any]] = {
    kind.__name__: kind for kind in (PerTensor, PerChannel, PerGroup, PerRow, PerToken, PerBlock)
}


@dataclass(frozen=True, kw_only=True)
class TensorForm:
    """The form of a quantized tensor, without its numbers.

    Args:
        scheme: how it is quantized.
        dtype: of its real values, which is the dtype that code sees.
        shape: as it was quantized. Codes and scales always lie in this order.
        axes: the order of those axes that code sees; transposing changes this alone.
        layout: the name of the layout of its codes.
        input: how the activations are quantized that a product multiplies with it; None for float.
    """

    scheme: TensorScheme
    dtype: torch.dtype
    shape: tuple[int, ...]
    axes: tuple[int, ...] = ()
    layout: str = "plain"
    input: TensorScheme | None = None

    def __post_init__(self) -> None:
        if not self.axes:
            object.__setattr__(self, "axes", tuple(range(len(self.shape))))

    def __hash__(self) -> int:
        return self._hash

    def __deepcopy__(self, memo: dict[int, Any]) -> "TensorForm":
        return self  # frozen; compiled code compares each call's forms with copies of them

    @cached_property
    def _hash(self) -> int:
        # Kept, because each product looks its kernel up.
        return hash(tuple(getattr(self, field.name) for field in fields(self)))

    @cached_property
    def block(self) -> tuple[int, ...]:
        """The lengths of a block that shares a scale, by axis of `shape`."""
        return block_lengths(self.scheme.granularity, len(self.shape))

    @property
    def is_upright(self) -> bool:
        """True if code sees the axes in the order in which they were quantized."""
        return self.axes == tuple(range(len(self.shape)))

    @property
    def upright_axes(self) -> list[int]:
        """What turns axes as code sees them back into the order of the codes."""
        return [self.axes.index(axis) for axis in range(len(self.axes))]

    @property
    def seen_shape(self) -> tuple[int, ...]:
        """The shape that code sees."""
        return tuple(self.shape[axis] for axis in self.axes)

    @property
    def seen_strides(self) -> tuple[int, ...]:
        """The strides that code sees: those of contiguous memory in the order of `shape`."""
        strides = [1] * len(self.shape)
        for axis in range(len(self.shape) - 2, -1, -1):
            strides[axis] = strides[axis + 1] * max(1, self.shape[axis + 1])
        return tuple(strides[axis] for axis in self.axes)

    @property
    def is_scaled_by_rows(self) -> bool:
        """True if there is a scale for each row, or one for all."""
        granularity = self.scheme.granularity
        return granularity == PerChannel(0) or isinstance(granularity, PerTensor)

    @property
    def format_name(self) -> str:
        """The name of the codes' format: "int4", "float8_e4m3fn", "nf4".

        >>> from pt2e_quant.core.scheme_names import scheme_named
        >>> TensorForm(
        ...     scheme=scheme_named("w4_g32").weight, dtype=torch.float32, shape=(8, 32)
        ... ).format_name
        'int4'
        """
        named = self.scheme.format
        return str(self.scheme.dtype).removeprefix("torch.") if named is None else named.name

    def with_layout(self, layout: str) -> "TensorForm":
        """The same in another layout."""
        return replace(self, layout=layout)


def form_to_text(form: TensorForm) -> str:
    """A form as one line of JSON, for files."""
    return json.dumps(
        {
            "scheme": scheme_to_json(form.scheme),
            "dtype": _name(form.dtype),
            "shape": list(form.shape),
            "axes": list(form.axes),
            "layout": form.layout,
            "input": None if form.input is None else scheme_to_json(form.input),
        }
    )


def form_from_text(text: str) -> TensorForm:
    """The form that `form_to_text` wrote.

    Raises:
        ConfigError: the text is none of its.
    """
    try:
        found = json.loads(text)
        given = found["input"]
        return TensorForm(
            scheme=scheme_from_json(found["scheme"]),
            dtype=_dtype(found["dtype"]),
            shape=tuple(found["shape"]),
            axes=tuple(found["axes"]),
            layout=found["layout"],
            input=None if given is None else scheme_from_json(given),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"this is no description of a quantized tensor: {text[:80]}") from error


def scheme_to_json(scheme: TensorScheme) -> dict[str, Any]:
    """A tensor's scheme as values that JSON has."""
    return {
        "dtype": _name(scheme.dtype),
        "granularity": _granularity_to_json(scheme.granularity),
        "symmetric": scheme.symmetric,
        "range": [scheme.quant_min, scheme.quant_max],
        "is_dynamic": scheme.is_dynamic,
        "format": _format_to_json(scheme),
        "scales": {
            field.name: _name(value) if isinstance(value, torch.dtype) else value
            for field in fields(ScaleFormat)
            if (value := getattr(scheme.scales, field.name)) is not None
        },
    }


def scheme_from_json(found: dict[str, Any]) -> TensorScheme:
    """The scheme that `scheme_to_json` gave the values of."""
    low, high = found["range"]
    scales: dict[str, Any] = {
        key: _dtype(value) if key in ("dtype", "precision") else value
        for key, value in found["scales"].items()
    }
    given, form = found["format"], None
    if given is not None:
        is_float = "bits" not in given
        form = float_format(given["name"]) if is_float else _code_book(given)
    return TensorScheme(
        dtype=_dtype(found["dtype"]),
        granularity=_granularity_from_json(found["granularity"]),
        symmetric=found["symmetric"],
        quant_min=low,
        quant_max=high,
        is_dynamic=found["is_dynamic"],
        format=form,
        scales=ScaleFormat(**scales),
    )


def _code_book(given: dict[str, Any]) -> CodeBook:
    return CodeBook(name=given["name"], bits=given["bits"], values=tuple(given["values"]))


def _format_to_json(scheme: TensorScheme) -> dict[str, Any] | None:
    form = scheme.format
    if isinstance(form, CodeBook):
        return {"name": form.name, "bits": form.bits, "values": list(form.values)}
    return None if form is None else {"name": form.name}


def _granularity_to_json(granularity: Granularity) -> dict[str, Any]:
    kind = type(granularity)
    return {"kind": kind.__name__} | {
        field.name: getattr(granularity, field.name) for field in fields(kind)
    }


def _granularity_from_json(found: dict[str, Any]) -> Granularity:
    given = dict(found)
    kind = _GRANULARITIES[given.pop("kind")]
    made: Granularity = kind(
        **{name: tuple(v) if isinstance(v, list) else v for name, v in given.items()}
    )
    return made


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name} is no dtype")
    return found
