"""What int8_conv2d is checked, timed and tuned on: the layers of ResNet-50 and MobileNetV2."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.kernels.bench_case import Bench, BenchCase, Bound, MathUnit, Peer, tile_grid
from pt2e_quant.kernels.fused_op import triton_kernel
from pt2e_quant.kernels.int8_conv2d.op import cost
from pt2e_quant.kernels.int8_conv2d.pack import pack_weight, unpack_weight, window_sums
from pt2e_quant.kernels.int8_conv2d.reference import int8_conv2d as reference
from pt2e_quant.kernels.int8_conv2d.window import conv_sizes
from pt2e_quant.kernels.tiles import TileConfig, read_tiles

__all__ = ["BENCH"]

_kernel = triton_kernel("pt2e_quant.kernels.int8_conv2d.gpu", "int8_conv2d")
_PAIR = tuple[int, int]


class Layer(NamedTuple):
    """A convolution in numbers, with equal strides and paddings on both axes."""

    batch: int
    channels: int
    outputs: int
    size: int
    kernel: int = 1
    stride: int = 1
    padding: int = 0
    groups: int = 1
    adds: bool = False

    @property
    def window(self) -> tuple[_PAIR, _PAIR, _PAIR, int]:
        """Stride, padding, dilation and groups."""
        stride, padding = (self.stride,) * 2, (self.padding,) * 2
        return stride, padding, (1, 1), self.groups

    @property
    def weight_shape(self) -> tuple[int, ...]:
        """As torch has it: [O, C / groups, KH, KW]."""
        return (self.outputs, self.channels // self.groups, self.kernel, self.kernel)

    @property
    def x_shape(self) -> tuple[int, ...]:
        """[N, C, H, W]."""
        return (self.batch, self.channels, self.size, self.size)


class Operands(NamedTuple):
    """Arguments of the fused call."""

    x: Tensor
    x_scale: Tensor
    x_zero_point: Tensor
    weight: Tensor
    weight_scale: Tensor
    weight_sums: Tensor
    stride: _PAIR
    padding: _PAIR
    dilation: _PAIR
    groups: int
    bias: Tensor
    residual: Tensor | None
    out_scale: float


def _integers(shape: tuple[int, ...], device: torch.device, generator: torch.Generator) -> Tensor:
    return torch.randint(-128, 128, shape, dtype=torch.int8, device=device, generator=generator)


def _operands(layer: Layer) -> Callable[[torch.device, int], Operands]:
    def make(device: torch.device, seed: int) -> Operands:
        generator = torch.Generator(device).manual_seed(seed)
        weight = _integers(layer.weight_shape, device, generator)
        x = _integers(layer.x_shape, device, generator)
        packed = pack_weight(weight, layer.groups)
        sizes = conv_sizes(layer.x_shape, packed.shape, *layer.window)
        shape = (layer.batch, layer.outputs, *sizes.out)
        residual = _integers(shape, device, generator) if layer.adds else None
        scales = torch.rand(layer.outputs + 1, device=device, generator=generator)
        return Operands(
            x.contiguous(memory_format=torch.channels_last),
            scales[:1] * 0.02 + 0.01,
            _integers((1,), device, generator).int(),
            packed,
            scales[1:] * 0.01 + 0.001,
            window_sums(weight),
            *layer.window,
            torch.randn(layer.outputs, device=device, generator=generator),
            None if residual is None else residual.contiguous(memory_format=torch.channels_last),
            0.02 * weight[0].numel() ** 0.5,
        )

    return make


def _draw(device: torch.device, seed: int) -> Operands:
    """Ragged sizes; every third depthwise, every third grouped, every other with a sum."""
    generator = torch.Generator().manual_seed(seed)

    def below(most: int) -> int:
        return int(torch.randint(most, (), generator=generator))

    kernel, groups = 1 + below(5), (1, 2 + below(3), 3 + below(60))[seed % 3]
    depth = 1 if seed % 3 == 2 else 1 + below(150)
    return _operands(
        Layer(
            1 + below(3),
            groups * depth,
            groups * (1 + below(2 if seed % 3 == 2 else 60)),
            kernel + below(40),
            kernel,
            1 + below(3),
            below(kernel),
            groups,
            adds=seed % 2 == 1,
        )
    )(device, seed)


def _end(operands: Operands) -> dict[str, Any]:
    return {
        "bias": operands.bias,
        "residual": operands.residual,
        "residual_scale": 0.05,
        "residual_zero_point": 3,
        "activation": "relu",
        "out_dtype": torch.int8,
        "out_scale": operands.out_scale,
        "out_zero_point": -128,
    }


def _call(operands: Operands, tiles: TileConfig | None) -> object:
    return _kernel(*operands[:10], tiles=tiles, **_end(operands))


def _reference(operands: Operands) -> object:
    return reference(*operands[:10], **_end(operands))


def _prepared(dtype: torch.dtype, *, compiled: bool) -> Callable[[Operands], Callable[[], object]]:
    """The same layer in a float dtype, channels-last, what follows it as the model would run it."""

    def layer(x: Tensor, weight: Tensor, bias: Tensor, added: Tensor | None, o: Operands) -> Tensor:
        y = F.conv2d(x, weight, bias, o.stride, o.padding, o.dilation, o.groups)
        return torch.relu(y if added is None else y + added)

    run = torch.compile(layer, dynamic=False) if compiled else layer

    def prepare(o: Operands) -> Callable[[], object]:
        def cast(tensor: Tensor) -> Tensor:
            return tensor.to(dtype).contiguous(memory_format=torch.channels_last)

        x = cast((o.x.float() - o.x_zero_point) * o.x_scale)
        weight = cast(unpack_weight(o.weight) * o.weight_scale.reshape(-1, 1, 1, 1))
        added = None if o.residual is None else cast(o.residual.float() * 0.05)
        bias = o.bias.to(dtype)
        return lambda: run(x, weight, bias, added, o)

    return prepare


_PEERS: dict[str, Peer[Operands]] = {
    "cuDNN fp16 channels-last": Peer(
        prepare=_prepared(torch.float16, compiled=False), is_float=True
    ),
    "cuDNN bf16 channels-last": Peer(
        prepare=_prepared(torch.bfloat16, compiled=False), is_float=True
    ),
    "torch.compile bf16": Peer(prepare=_prepared(torch.bfloat16, compiled=True), is_float=True),
}


def _case(layer: Layer) -> BenchCase[Operands]:
    meta = torch.device("meta")
    weight = pack_weight(
        torch.empty(layer.weight_shape, dtype=torch.int8, device=meta), layer.groups
    )
    sizes = conv_sizes(layer.x_shape, weight.shape, *layer.window)
    x = torch.empty(layer.x_shape, dtype=torch.int8, device=meta)
    out_shape = (layer.batch, layer.outputs, *sizes.out)
    out = torch.empty(out_shape, dtype=torch.int8, device=meta)
    name = f"{layer.batch}x{layer.channels}x{layer.size}^2 to {layer.outputs} "
    name += f"{layer.kernel}x{layer.kernel}/{layer.stride}"
    name += f" groups {layer.groups}" if layer.groups > 1 else ""
    name += " + residual" if layer.adds else ""
    return BenchCase(
        name=name,
        shape_class=sizes.shape_class,
        make=_operands(layer),
        cost=cost(x, weight, out),
        unit=MathUnit.FLOAT32 if sizes.is_depthwise else MathUnit.INT8,
        peers=_PEERS,
        # Fewer bytes are the gain of most layers: half of fp16's, a third less with a residual.
        targets={"cuDNN fp16 channels-last": 1.6} if layer.batch > 1 else {},
    )


_LAYERS = tuple(
    layer._replace(batch=batch)
    for batch in (64, 1)
    for layer in (
        Layer(0, 3, 64, 224, kernel=7, stride=2, padding=3),
        # The same as `widen_pixels` leaves it.
        Layer(0, 4, 64, 224, kernel=7, stride=2, padding=3),
        Layer(0, 64, 64, 56, kernel=3, padding=1),
        Layer(0, 64, 256, 56, adds=True),
        Layer(0, 256, 64, 56),
        Layer(0, 128, 128, 28, kernel=3, padding=1),
        Layer(0, 512, 1024, 28, stride=2),
        Layer(0, 256, 256, 14, kernel=3, padding=1),
        Layer(0, 1024, 256, 14),
        Layer(0, 512, 512, 7, kernel=3, padding=1),
        Layer(0, 512, 2048, 7, adds=True),
        Layer(0, 24, 144, 56),
        Layer(0, 144, 144, 56, kernel=3, padding=1, groups=144),
    )
)


def _sweep(shape_class: str) -> tuple[TileConfig, ...]:
    if shape_class == "depthwise":
        return tile_grid(
            num_warps=(2, 4, 8), num_stages=(1,), BLOCK_M=(8, 16, 32, 64), BLOCK_N=(32, 64, 128)
        )
    is_large, is_narrow = "large" in shape_class, "narrow" in shape_class
    return tile_grid(
        num_warps=(4, 8),
        num_stages=(2, 3, 4),
        BLOCK_M=(64, 128) if is_large else (32, 64),
        BLOCK_N=(32, 64) if is_narrow else (64, 128, 256) if is_large else (32, 64, 128),
        BLOCK_K=(64, 128) if shape_class.startswith(("dense", "pointwise")) else (32, 64),
    )


BENCH = Bench(
    op="int8_conv2d",
    call=_call,
    reference=_reference,
    draw=_draw,
    # The definition's own steps.
    bound=lambda operands: Bound(),
    cases=tuple(_case(layer) for layer in _LAYERS),
    sweep={name: _sweep(name) for name in read_tiles("int8_conv2d")},
)
