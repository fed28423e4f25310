"""Sizes of a convolution, read from its operands, and the shape class that they fall in."""

from collections.abc import Sequence
from dataclasses import dataclass

from pt2e_quant.core.errors import InputError

_NARROW = 64
_SMALL = 4096
_SHALLOW = 64
_STEM = 16


def output_size(size: int, kernel: int, stride: int, padding: int, dilation: int) -> int:
    """Places of a window along one axis.

    >>> output_size(7, kernel=3, stride=2, padding=1, dilation=1)
    4
    """
    return (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvSizes:
    """A convolution in numbers; each pair is (along H, along W).

    Args:
        batch: images.
        channels: input channels C.
        outputs: output channels O.
        image: (H, W).
        kernel: (KH, KW).
        out: (OH, OW).
        stride: of the window.
        padding: on each side.
        dilation: of the taps.
        groups: of channels.
    """

    batch: int
    channels: int
    outputs: int
    image: tuple[int, int]
    kernel: tuple[int, int]
    out: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    groups: int

    @property
    def pixels(self) -> int:
        """Rows of the product: N * OH * OW."""
        return self.batch * self.out[0] * self.out[1]

    @property
    def depth(self) -> int:
        """Input channels of one group."""
        return self.channels // self.groups

    @property
    def columns(self) -> int:
        """Output channels of one group."""
        return self.outputs // self.groups

    @property
    def is_depthwise(self) -> bool:
        """One input channel for each output: bound by memory, no work for matrix units."""
        return self.groups > 1 and self.depth == 1

    @property
    def is_pointwise(self) -> bool:
        """One tap, which is inside of the image everywhere: a product with one matrix."""
        return self.kernel == (1, 1) and not any(self.padding)

    @property
    def is_folded(self) -> bool:
        """True if a step of the product runs over the taps of a row too.

        With less than 64 channels the matrix units would multiply by zeros otherwise.
        """
        return self.depth < _SHALLOW

    @property
    def _kind(self) -> str:
        if self.is_folded:
            return "stem" if self.depth < _STEM else "folded"
        return "pointwise" if self.is_pointwise else "dense"

    @property
    def shape_class(self) -> str:
        """The row of the tile tables: kind, number of pixels, number of output channels."""
        if self.is_depthwise:
            return "depthwise"
        size = "small" if self.pixels <= _SMALL else "large"
        return f"{self._kind}_{size}_{'narrow' if self.columns <= _NARROW else 'wide'}"


def conv_sizes(
    x_shape: Sequence[int],
    weight_shape: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> ConvSizes:
    """The sizes of `op.Int8Conv2d`'s operands; sizes may be symbolic.

    Args:
        x_shape: (N, C, H, W).
        weight_shape: of the packed weight, see `pack.pack_weight`.
        stride: (along H, along W).
        padding: likewise.
        dilation: likewise.
        groups: of channels.

    Raises:
        InputError: x and weight do not go together.
    """
    if len(x_shape) != 4:
        raise InputError(f"int8_conv2d takes x as [N, C, H, W], found {list(x_shape)}")
    batch, channels, height, width = x_shape
    is_depthwise = len(weight_shape) == 3
    kernel = tuple(weight_shape[:2] if is_depthwise else weight_shape[1:3])
    outputs = weight_shape[2] if is_depthwise else weight_shape[0]
    depth = 1 if is_depthwise else weight_shape[3]
    if channels != depth * groups:
        raise InputError(
            f"int8_conv2d: x has {channels} channels, the weight {groups} groups of {depth}"
        )
    out = tuple(
        output_size(size, kernel[i], stride[i], padding[i], dilation[i])
        for i, size in enumerate((height, width))
    )
    return ConvSizes(
        batch=batch,
        channels=channels,
        outputs=outputs,
        image=(height, width),
        kernel=(kernel[0], kernel[1]),
        out=(out[0], out[1]),
        stride=(stride[0], stride[1]),
        padding=(padding[0], padding[1]),
        dilation=(dilation[0], dilation[1]),
        groups=groups,
    )
