"""The sizes that a captured call takes, and upper bounds given to them after the capture."""

from collections.abc import Mapping
from dataclasses import replace

from torch.fx import GraphModule

from pt2e_quant.core.capture import Capture
from pt2e_quant.core.errors import ConfigError, near
from pt2e_quant.core.export_dims import DimRange
from pt2e_quant.core.input_info import InputInfo, InputKind
from pt2e_quant.core.read_capture import CAPTURE_KEY, capture_of

MaxSizes = Mapping[str, int | Mapping[int, int]]
"""The largest size by input and dimension, {"x": {0: 64}}, or by symbol, {"s77": 64}."""


def limit_graph(gm: GraphModule, max_sizes: MaxSizes) -> None:
    """Let a prepared or converted graph take no larger sizes; see `limit_sizes`."""
    gm.meta[CAPTURE_KEY] = limit_sizes(capture_of(gm), max_sizes)


def limit_sizes(capture: Capture, max_sizes: MaxSizes) -> Capture:
    """A capture whose dynamic dimensions end at the sizes given.

    Raises:
        ConfigError: no input or symbol has that name, the dimension is not dynamic, or the size is
            below the example's or above what was captured.
    """
    dims = dict(capture.dims)
    inputs = {i.path: i for i in capture.inputs if i.kind is InputKind.TENSOR}
    for name, given in max_sizes.items():
        if isinstance(given, int) and name in dims:
            dims[name] = _limited(dims[name], given, f'max_sizes {{"{name}": {given}}}')
        elif isinstance(given, Mapping) and name in inputs:
            for dim, size in given.items():
                symbol = _symbol(inputs[name], dim, dims)
                where = f'max_sizes {{"{name}": {{{dim}: {size}}}}}'
                dims[symbol] = _limited(dims[symbol], size, where)
        else:
            raise ConfigError(
                f'max_sizes names "{name}": {near(name, [*inputs, *dims])}',
                fix='max_sizes={"x": {0: 64}}: input, dimension, largest size',
            )
    return replace(capture, dims=dims)


def _symbol(info: InputInfo, dim: int, dims: Mapping[str, DimRange]) -> str:
    rank = len(info.shape)
    size = info.shape[dim] if -rank <= dim < rank else None
    if isinstance(size, str) and size in dims:
        return size
    free = [d for d, s in enumerate(info.shape) if isinstance(s, str)]
    what = f"follows from others ({size})" if isinstance(size, str) else "is not dynamic"
    raise ConfigError(
        f'max_sizes bounds dimension {dim} of input "{info.path}", which {what}',
        fix=f"its dynamic dimensions are {free}; the symbols are {sorted(dims)}",
    )


def _limited(limits: DimRange, maximum: int, where: str) -> DimRange:
    if maximum < limits.hint:
        raise ConfigError(f"{where} is below the example's size, {limits.hint}")
    if limits.maximum is not None and maximum > limits.maximum:
        raise ConfigError(
            f"{where} is above what the graph was captured for, {limits.maximum}",
            fix="export the model again with a wider torch.export.Dim range there",
        )
    return replace(limits, maximum=maximum)


def unbounded_dims(capture: Capture) -> dict[str, dict[int, str]]:
    """Dimensions without an upper bound: input to dimension to symbol."""
    found: dict[str, dict[int, str]] = {}
    for info in capture.inputs:
        for dim, size in enumerate(info.shape):
            limits = capture.dims.get(size) if isinstance(size, str) else None
            if isinstance(size, str) and limits is not None and limits.maximum is None:
                found.setdefault(info.path, {})[dim] = size
    return found


def shown_sizes(capture: Capture) -> list[str]:
    """The sizes each input takes, a line each.

    For example "x: (1 to 64, 3, 224, 224) float32".
    """
    return [
        f"{i.path}: ({', '.join(_shown(s, capture.dims) for s in i.shape)}) {i.dtype}"
        for i in capture.inputs
        if i.kind is InputKind.TENSOR
    ]


def _shown(size: int | str, dims: Mapping[str, DimRange]) -> str:
    limits = dims.get(size) if isinstance(size, str) else None
    if limits is None:
        return str(size)
    steps = f", multiples of {limits.multiple}" if limits.multiple > 1 else ""
    return f"{limits.minimum} to {'any' if limits.maximum is None else limits.maximum}{steps}"
