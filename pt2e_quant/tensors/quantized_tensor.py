"""`QuantizedTensor`: codes, qparams, scheme and layout, seen by code as a float tensor."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from multiprocessing.context import get_spawning_popen
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import return_and_correct_aliasing

from pt2e_quant.core.arguments import check_tensor
from pt2e_quant.core.errors import ConfigError
from pt2e_quant.core.formats.block_qparams import BlockQParams
from pt2e_quant.core.qparams import QParams
from pt2e_quant.core.schemes import TensorScheme
from pt2e_quant.observers.weights.weight_search import WeightSearch
from pt2e_quant.tensors.exporting import call_exported, emit_values, is_traced_by_export
from pt2e_quant.tensors.form import TensorForm, form_from_text, form_to_text
from pt2e_quant.tensors.kept_for_backward import call_with_aliases
from pt2e_quant.tensors.kernels.fallbacks import note_operator
from pt2e_quant.tensors.layouts.table import layout_named
from pt2e_quant.tensors.values import (
    Parts,
    check_values,
    decode,
    empty_parts,
    encode,
    find_qparams,
    qparam_parts,
    quantize_values,
)

Handler = Callable[..., Any]
FUNCTIONS: dict[Any, Handler] = {}
"""torch functions that have a quantized form, by function; `tensors.functions` fills it."""
ATEN: dict[Any, Handler] = {}
"""ATen operators that keep a tensor quantized, by overload; `tensors.aten_ops` fills it."""

KERNEL_NAMES: list[str] = []
"""Names of all kernels; `tensors.kernels.dispatch` fills it, and compiled code depends on it."""
_TRACED = 2
"""Raised when compilers see other operators of a tensor: what they have kept is out of date."""


class QuantizedTensor(torch.Tensor):
    """A tensor that is stored as codes and scales. Code sees its real values' shape and dtype.

    Products with it go to the kernel that `tensors.kernels` names. What has no quantized form is
    done on real values, which `tensors.fallbacks` records.

    Args:
        parts: what `form.layout` holds, see `tensors.values`.
        form: scheme, dtype, shape, axes and layout.
        requires_grad: whether gradients are gathered, in `form.dtype`.
    """

    form: TensorForm
    part_names: tuple[str, ...]
    alias_of: "QuantizedTensor | None" = None

    @staticmethod
    def __new__(
        cls: type["QuantizedTensor"],
        parts: Mapping[str, Tensor],
        form: TensorForm,
        requires_grad: bool = False,
    ) -> "QuantizedTensor":
        """Wrap parts; they are shared, not copied."""
        first = next(iter(parts.values()))
        made: QuantizedTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            form.seen_shape,
            strides=form.seen_strides,
            dtype=form.dtype,
            device=first.device,
            requires_grad=requires_grad,
        )
        made.form = form
        made.part_names = tuple(parts)
        for name, value in parts.items():
            setattr(made, name, value)
        return made

    def __init__(
        self, parts: Mapping[str, Tensor], form: TensorForm, requires_grad: bool = False
    ) -> None:
        pass  # all is done in __new__

    # ---- making one ----

    @classmethod
    def from_float(
        cls,
        values: Tensor,
        scheme: TensorScheme,
        *,
        layout: str = "plain",
        input: TensorScheme | None = None,
        search: WeightSearch = WeightSearch.MIN_MAX,
        qparams: QParams | BlockQParams | None = None,
    ) -> "QuantizedTensor":
        """Quantize a tensor as the graph flow quantizes a constant weight.

        Args:
            values: a float tensor; one on the meta device gives a tensor to load into.
            scheme: how.
            layout: of the result.
            input: how the activations are quantized that a product multiplies with it.
            search: how scales are found.
            qparams: given ones, instead of those found.

        Raises:
            ConfigError: the scheme or the layout does not fit the tensor.
            CalibrationError: NaN or infinity in the tensor.
        """
        check_values(values, scheme, input, qparams)
        form = TensorForm(scheme=scheme, dtype=values.dtype, shape=tuple(values.shape), input=input)
        if values.device.type == "meta":
            parts = empty_parts(form, values.device)
            layout = layout if layout == "packed" else "plain"  # others are made of numbers
        else:
            with torch.no_grad():
                found = find_qparams(values, scheme, search) if qparams is None else qparams
                parts = quantize_values(values.detach(), form, found)
        return cls(parts, form).to_layout(layout)

    @classmethod
    def from_qparams(
        cls, codes: Tensor, qparams: QParams | BlockQParams, form: TensorForm
    ) -> "QuantizedTensor":
        """Codes and qparams that are there already, of a canonical graph for example.

        Args:
            codes: one per element, in the storage dtype.
            qparams: the qparams.
            form: in the plain layout.
        """
        return cls({"codes": codes} | qparam_parts(form, qparams), form)

    def like(self, parts: Mapping[str, Tensor], form: TensorForm) -> "QuantizedTensor":
        """A tensor of this class with other parts."""
        return type(self)(parts, form)

    # ---- reading it ----

    @property
    def scheme(self) -> TensorScheme:
        """Its quantization scheme."""
        return self.form.scheme

    @property
    def parts(self) -> Parts:
        """The tensors that its layout holds, by name."""
        held = self if self.alias_of is None else self.alias_of
        return {name: getattr(held, name) for name in self.part_names}

    def plain_parts(self) -> Parts:
        """Its parts in the plain layout: `codes` and qparams."""
        return layout_named(self.form.layout).unpack(self.parts, self.form)

    def dequantize(self) -> Tensor:
        """The real values, in the order of axes that code sees; the gradient passes through."""
        if not self.requires_grad or torch.compiler.is_exporting():
            return _real(self)
        return cast(Tensor, _Dequantize.apply(self))  # type: ignore[no-untyped-call]

    def to_layout(self, layout: str) -> "QuantizedTensor":
        """The same codes in another layout.

        Raises:
            ConfigError: the layout does not take this tensor; says why.
        """
        if layout == self.form.layout:
            return self
        wanted, plain = layout_named(layout), self.form.with_layout("plain")
        if reason := wanted.refusal(plain):
            raise ConfigError(f'layout "{layout}" does not take {self.form.scheme}: {reason}')
        packed = wanted.pack(self.plain_parts(), plain)
        return _like_parameter(self.like(packed, self.form.with_layout(layout)), self)

    @property
    def nbytes(self) -> int:  # type: ignore[override]  # a property of torch.Tensor too
        """Bytes that the parts take."""
        # Opaque parts have no nbytes of their own.
        return sum(part.numel() * part.element_size() for part in self.parts.values())

    # ---- changing it ----

    def requantize_(
        self,
        values: Tensor,
        *,
        search: WeightSearch = WeightSearch.MIN_MAX,
        encode: Callable[[Tensor, Mapping[str, Tensor], TensorForm], Tensor] = encode,
        ranges: Tensor | None = None,
    ) -> "QuantizedTensor":
        """Take the nearest codes to new real values, under new scales, in place; return the tensor.

        Args:
            values: float, of this shape.
            search: how scales are found.
            encode: gives the codes, of (values, qparams, form): another rounding, say.
            ranges: what scales are found from, of as many dimensions; the values if None.
        """
        form, order = self.form, self.form.upright_axes
        check_tensor("values", values)
        if values.shape != self.shape:
            raise ConfigError(f"values are {tuple(self.shape)}, found {tuple(values.shape)}")
        if not self.numel():
            return self
        with torch.no_grad():
            upright = values.detach().to(form.dtype).permute(order)
            seen = upright if ranges is None else ranges.detach().to(form.dtype).permute(order)
            found = qparam_parts(form, find_qparams(seen, form.scheme, search))
            plain = {"codes": encode(upright, found, form)} | found
            packed = layout_named(form.layout).pack(plain, form.with_layout("plain"))
            for name, value in packed.items():
                part: Tensor = getattr(self, name)
                if part.is_mkldnn:
                    self.replace_part(name, value)
                else:
                    part.copy_(value)
        return self

    def replace_part(self, name: str, value: Tensor) -> None:
        """Take another opaque part, which cannot be written; so does what this is an alias of."""
        setattr(self, name, value)
        if self.alias_of is not None:
            self.alias_of.replace_part(name, value)

    # ---- what torch asks of a subclass ----

    def __tensor_flatten__(self) -> tuple[list[str], TensorForm]:
        return list(self.part_names), self.form

    @classmethod
    def __tensor_unflatten__(
        cls,
        parts: dict[str, Tensor],
        form: TensorForm,
        outer_size: Any = None,
        outer_stride: Any = None,
    ) -> "QuantizedTensor":
        return cls(parts, form)

    def _stable_hash_for_caching(self) -> str:
        """The key of compiled graphs, besides the parts."""
        return f"{form_to_text(self.form)} {','.join(KERNEL_NAMES)} {_TRACED}"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in FUNCTIONS:
            return FUNCTIONS[func](*args, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            call = call_exported if is_traced_by_export() else call_with_aliases
            return call(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares its default as a function
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        handler = ATEN.get(func)
        if handler is not None:
            found = handler(func, args, kwargs)
            if found is not NotImplemented and _is_quantized(found):
                return return_and_correct_aliasing(func, args, kwargs, found)  # type: ignore[no-untyped-call]  # torch's
            if found is not NotImplemented:
                return found
        return on_real_values(func, args, kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        form = self.form
        dtype = str(form.dtype).removeprefix("torch.")
        shown = [str(form.scheme), f"shape={tuple(self.shape)}", f"dtype={dtype}"]
        shown += [f"layout={form.layout}"] if form.layout != "plain" else []
        shown += [f"input={form.input}"] if form.input is not None else []
        shown += [f"device={self.device}"] if self.device.type != "cpu" else []
        if self.device.type != "meta" and type(next(iter(self.parts.values()))) is Tensor:
            low, high = torch.aminmax(_real(self))
            shown.append(f"range=[{low.item():.4g}, {high.item():.4g}]")
        return f"{type(self).__name__}({', '.join(shown)})"

    def __deepcopy__(self, memo: dict[int, Any]) -> "QuantizedTensor":
        # An opaque part is never written, so that copies share it.
        made = changed_parts(self, lambda part: part if part.is_mkldnn else part.detach().clone())
        memo[id(self)] = made
        if self.grad is not None:
            made.grad = self.grad.clone()
        return _like_parameter(made, self)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # In a form that any machine can read: what is packed for this one is unpacked.
        portable = portable_form(self)
        text = form_to_text(portable.form)
        is_parameter = isinstance(self, nn.Parameter)
        held = {name: _as_bytes(part) for name, part in portable.parts.items()}
        dtypes = {n: p.dtype for n, p in portable.parts.items() if held[n].dtype is not p.dtype}
        starting = get_spawning_popen()
        if starting is not None and portable is not self:
            # The new process opens their memory after this pickle is written.
            vars(starting).setdefault("held_parts", []).append(held)
        return rebuild_quantized_tensor, (held, text, self.requires_grad, is_parameter, dtypes)


def _as_bytes(part: Tensor) -> Tensor:
    """A part as plain pickle reads it back: torch 2.13 cannot for floats of one byte."""
    return part.view(torch.uint8) if part.is_floating_point() and part.itemsize == 1 else part


def portable_form(tensor: QuantizedTensor) -> QuantizedTensor:
    """A tensor as files keep it: packed below 8 bits, else plain."""
    return tensor.to_layout("packed" if tensor.form.scheme.bits < 8 else "plain")


def rebuild_quantized_tensor(
    parts: dict[str, Tensor],
    text: str,
    requires_grad: bool,
    is_parameter: bool,
    dtypes: Mapping[str, torch.dtype],
) -> QuantizedTensor:
    """Rebuild a tensor for `pickle`; a safe global of `torch.load`."""
    own = {name: part.view(dtypes.get(name, part.dtype)) for name, part in parts.items()}
    made = QuantizedTensor(own, form_from_text(text), requires_grad)
    if is_parameter:
        made._is_param = True  # as nn.Parameter marks what it wraps
    return made


torch.serialization.add_safe_globals([rebuild_quantized_tensor])


def as_parameter(tensor: QuantizedTensor, *, requires_grad: bool) -> nn.Parameter:
    """Mark a tensor as a parameter, as `nn.Parameter` marks what it wraps, without a copy of it."""
    tensor.requires_grad_(requires_grad)
    tensor._is_param = True
    return cast(nn.Parameter, tensor)


def _like_parameter(made: QuantizedTensor, like: QuantizedTensor) -> QuantizedTensor:
    made.requires_grad_(like.requires_grad)
    if isinstance(like, nn.Parameter):
        made._is_param = True
    return made


def _is_quantized(found: Any) -> bool:
    made = found if isinstance(found, list) else [found]
    return all(isinstance(tensor, QuantizedTensor) for tensor in made)


def _real(tensor: QuantizedTensor) -> Tensor:
    if torch.compiler.is_exporting():
        return emit_values(tensor.plain_parts(), tensor.form)
    return decode(tensor.plain_parts(), tensor.form).permute(tensor.form.axes)


class _Dequantize(torch.autograd.Function):
    """Real values, with the gradient of the identity."""

    @staticmethod
    def forward(ctx: Any, tensor: QuantizedTensor) -> Tensor:
        """The real values."""
        return _real(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """The gradient as it is."""
        return grad


def on_real_values(func: Any, args: Any, kwargs: Any) -> Any:
    """Do an operation on real values and record it."""
    note_operator(func)
    only = torch.utils._pytree.tree_map_only
    real_args, real_kwargs = only(QuantizedTensor, _real, (args, kwargs))
    found = func(*real_args, **real_kwargs)
    for argument, written, values in zip(func._schema.arguments, args, real_args, strict=False):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        # Written in place: codes are found anew. Operators on lists write each of a list.
        is_list = isinstance(written, (list, tuple))
        for tensor, value in zip(written, values, strict=True) if is_list else [(written, values)]:
            if isinstance(tensor, QuantizedTensor):
                tensor.requantize_(value)
                found = tensor if found is value else found
    return found


def changed_parts(
    tensor: QuantizedTensor, change: Callable[[Tensor], Tensor], **fields: Any
) -> QuantizedTensor:
    """A tensor whose parts all went through a function, and whose form has other fields."""
    parts = {name: change(part) for name, part in tensor.parts.items()}
    return tensor.like(parts, replace(tensor.form, **fields))
