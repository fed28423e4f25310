"""The sums of a convolution in Triton: over taps and channels of channels-last images.

Places outside of the image are read as 0, which copies to shared memory do for nothing; the zero
point is taken off by what the taps inside the image sum to.
"""

import triton
import triton.language as tl


@triton.jit
def _is_below(place, size):
    """0 <= place < size in one comparison: as unsigned numbers, negative ones are the largest."""
    return place.to(tl.uint32, bitcast=True) < size


@triton.jit
def multiply_taps(
    total, x_at, weight_at, h0, w0, in_pixels, in_columns, H, W, C, depth_of_group, dilation_h,
    dilation_w,
    IS_PADDED: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Sum over taps, and over the channels of each tap in steps of BLOCK_K.

    Pixels that do not exist begin far above the image (h0) where there is padding.
    """
    steps = tl.arange(0, BLOCK_K)
    tap_h, tap_w, channel = 0, 0, 0
    for _ in range(0, KH * KW * tl.cdiv(depth_of_group, BLOCK_K)):
        in_image = in_pixels
        if IS_PADDED:
            h, w = h0 + tap_h * dilation_h, w0 + tap_w * dilation_w
            in_image = _is_below(h, H) & _is_below(w, W)
        in_depth = steps < depth_of_group - channel
        moved = (tap_h * dilation_h * W + tap_w * dilation_w) * C + channel
        along = (tap_h * KW + tap_w) * depth_of_group + channel
        left = tl.load(
            x_at[:, None] + (moved + steps)[None, :],
            mask=in_image[:, None] & in_depth[None, :],
            other=0,
        )
        right = tl.load(
            weight_at[None, :] + (along + steps)[:, None],
            mask=in_depth[:, None] & in_columns[None, :],
            other=0,
        )
        total = tl.dot(left, right, total, out_dtype=tl.int32)
        # No divisions: they would cost more than the loads of a step.
        channel += BLOCK_K
        ends_tap = (channel >= depth_of_group).to(tl.int32)
        channel *= 1 - ends_tap
        tap_w += ends_tap
        ends_row = (tap_w >= KW).to(tl.int32)
        tap_w *= 1 - ends_row
        tap_h += ends_row
    return total


@triton.jit
def multiply_rows_of_taps(
    total, x_at, weight_at, h0, w0, in_pixels, in_columns, H, W, C, tap_rows, dilation_h,
    dilation_w,
    IS_PADDED: tl.constexpr, KW: tl.constexpr, DEPTH: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Sum over rows of taps: few channels are folded with the taps of a row into one axis.

    Pixels that do not exist begin far above the image (h0) where there is padding.
    """
    LENGTH: tl.constexpr = KW * DEPTH
    STEPS: tl.constexpr = (LENGTH + BLOCK_K - 1) // BLOCK_K
    for step in range(0, tap_rows * STEPS):
        tap_h = step // STEPS
        along = (step % STEPS) * BLOCK_K + tl.arange(0, BLOCK_K)
        tap_w, channel = along // DEPTH, along % DEPTH
        in_length = along < LENGTH
        in_image = in_pixels[:, None] & in_length[None, :]
        if IS_PADDED:
            h = h0 + tap_h * dilation_h
            w = w0[:, None] + (tap_w * dilation_w)[None, :]
            in_image = _is_below(h, H)[:, None] & _is_below(w, W) & in_length[None, :]
        moved = tap_h * dilation_h * W * C + tap_w * dilation_w * C + channel
        left = tl.load(
            x_at[:, None] + moved[None, :],
            mask=in_image,
            other=0,
        )
        right = tl.load(
            weight_at[None, :] + (tap_h * LENGTH + along)[:, None],
            mask=in_length[:, None] & in_columns[None, :],
            other=0,
        )
        total = tl.dot(left, right, total, out_dtype=tl.int32)
    return total


@triton.jit
def _first_inside(start, dilation, TAPS: tl.constexpr):
    """The first tap of a window that is not in front of the image."""
    return tl.minimum((tl.maximum(0 - start, 0) + dilation - 1) // dilation, TAPS)


@triton.jit
def _end_inside(start, size, dilation, TAPS: tl.constexpr):
    """The first tap of a window that is behind the image."""
    return tl.minimum((tl.maximum(size - start, 0) + dilation - 1) // dilation, TAPS)


@triton.jit
def take_off_zero_point(
    total, zero_point, sums, h0, w0, columns, outputs, H, W, dilation_h, dilation_w, inside,
    KH: tl.constexpr, KW: tl.constexpr,
):  # fmt: skip
    """Subtract zero_point times the weights of those taps that are inside of the image."""
    top, left = _first_inside(h0, dilation_h, KH), _first_inside(w0, dilation_w, KW)
    bottom = tl.maximum(_end_inside(h0, H, dilation_h, KH), top)
    right = tl.maximum(_end_inside(w0, W, dilation_w, KW), left)
    # A loop that stays one: the four tiles of sums at once would not fit into registers.
    for corner in range(0, 4):
        tap_h = tl.where(corner < 2, bottom, top)
        tap_w = tl.where(corner % 2 == 0, right, left)
        at = (tap_h * (KW + 1) + tap_w) * outputs
        # Row and column 0 of the sums are zeros.
        is_read = inside & ((tap_h > 0) & (tap_w > 0))[:, None]
        before = tl.load(sums + at[:, None] + columns[None, :], mask=is_read, other=0)
        sign = tl.where((corner == 0) | (corner == 3), 1, -1)
        total -= sign * zero_point * before
    return total
