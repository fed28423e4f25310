"""How much faster are blocks of an image as SpaceToDepth and DepthToSpace in ONNX Runtime?

Run `python -m benchmarks.onnx_blocks`. Pixel shuffles and patches are transposes of six axes where
models write them, of which two or more move. Medians of sessions called in turn on one thread, in
microseconds. `order` has the axes where they are no image: C channels, h and w blocks, p and q
pixels of a block.
"""

import statistics
from collections.abc import Callable, Mapping

import numpy as np
from onnx import NodeProto, helper

from benchmarks.onnx_nodes import bind_nodes
from benchmarks.results import write_results
from pt2e_quant.backends.measure_speed import times_in_turn

SIZES = ((16, 32, 2), (3, 32, 4), (3, 14, 16), (64, 14, 2), (96, 28, 2))
"""Channels, blocks in a row, pixels in a row of a block; `size` of a row is these."""
DTYPES = ("float32", "uint8")
ORDERS = ("Cpqhw", "pqChw", "hwpqC", "hwCpq")
Form = tuple[list[NodeProto], Mapping[str, list[int]]]


def _sizes(order: str, channels: int, blocks: int, side: int) -> list[int]:
    sizes = {"C": channels, "h": blocks, "w": blocks, "p": side, "q": side}
    return [1, *(sizes[axis] for axis in order)]


def _permutation(source: str, target: str) -> list[int]:
    return [0, *(1 + source.index(axis) for axis in target)]


def _forms(order: str, channels: int, blocks: int, side: int, *, to_image: bool) -> list[Form]:
    """As a transpose, and as the operator for it."""
    depth = channels * side**2
    image = [1, channels, blocks * side, blocks * side]
    is_last = order.startswith("h")
    result = [1, blocks, blocks, depth] if is_last else [1, depth, blocks, blocks]
    ends = ("Chpwq", order)
    first, last = ends[::-1] if to_image else ends
    turn = [
        helper.make_node("Reshape", ["x", "split"], ["a"]),
        helper.make_node("Transpose", ["a"], ["b"], perm=_permutation(first, last)),
        helper.make_node("Reshape", ["b", "joined"], ["y"]),
    ]
    split = _sizes(first, channels, blocks, side)
    shapes = {"split": split, "joined": image if to_image else result}
    turned = helper.make_node("Transpose", ["x"], ["t"], perm=[0, 3, 1, 2])
    if to_image:
        mode = "CRD" if "Cpq" in order else "DCR"
        at = "t" if is_last else "x"
        nodes = [turned] if is_last else []
        nodes.append(helper.make_node("DepthToSpace", [at], ["y"], blocksize=side, mode=mode))
        return [(turn, shapes), (nodes, {})]
    nodes = [helper.make_node("SpaceToDepth", ["x"], ["d"], blocksize=side)]
    places = np.arange(depth).reshape(side**2, channels).T.reshape(-1).tolist()
    if "Cpq" in order:
        nodes.append(helper.make_node("Gather", ["d", "places"], ["g"], axis=1))
    if is_last:
        at = nodes[-1].output[0]
        nodes.append(helper.make_node("Transpose", [at], ["l"], perm=[0, 2, 3, 1]))
    nodes[-1].output[0] = "y"
    return [(turn, shapes), (nodes, {"places": places} if "Cpq" in order else {})]


def _call(form: Form, size: list[int], dtype: str) -> Callable[[], object]:
    nodes, constants = form
    held = {name: np.array(values, np.int64) for name, values in constants.items()}
    values = np.random.default_rng(0).integers(0, 255, size).astype(dtype)
    return bind_nodes(nodes, {"x": values}, held)


def measure(
    order: str, size: tuple[int, int, int], dtype: str, to_image: bool
) -> dict[str, object]:
    """Microseconds of both forms, whose results are equal."""
    channels, blocks, side = size
    forms = _forms(order, *size, to_image=to_image)
    image = [1, channels, blocks * side, blocks * side]
    depth = channels * side**2
    given = [1, blocks, blocks, depth] if order.startswith("h") else [1, depth, blocks, blocks]
    calls = [_call(form, given if to_image else image, dtype) for form in forms]
    (first,), (second,) = (call() for call in calls)
    assert np.array_equal(first, second)
    turned, as_depth = map(statistics.median, times_in_turn(calls, rounds=100, seconds=1))
    return {
        "order": order,
        "to_image": to_image,
        "dtype": dtype,
        "size": " x ".join(map(str, size)),
        "transpose_us": round(turned, 1),
        "depth_us": round(as_depth, 1),
        "times_as_fast": round(turned / as_depth, 2),
    }


def main() -> None:
    """Measure, print, write."""
    rows = [
        measure(order, size, dtype, to_image)
        for to_image in (False, True)
        for order in ORDERS
        for dtype in DTYPES
        for size in SIZES
    ]
    for row in rows:
        print(row)
    write_results("onnx_blocks", rows, ("order", "to_image", "dtype", "size"))


if __name__ == "__main__":
    main()
