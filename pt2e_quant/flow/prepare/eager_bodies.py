"""Control flow of a prepared graph with gradients: its bodies run as Python runs them.

For gradients torch traces the bodies of `cond`, `while_loop`, `map` and `scan` into graphs of fake
tensors, where an observer cannot look at values or keep statistics.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._higher_order_ops.map import map_impl
from torch.fx import GraphModule
from torch.overrides import TorchFunctionMode

from pt2e_quant.flow.prepare.prepared import PREPARED_KEY
from pt2e_quant.graph.subgraphs import bodies

Body = Callable[..., Sequence[Any]]


def _cond(predicate: Any, if_true: Body, if_false: Body, operands: Sequence[Any] = ()) -> Any:
    return tuple((if_true if bool(predicate) else if_false)(*operands))


def _while_loop(
    condition: Callable[..., Any], body: Body, carried: Sequence[Any], fixed: Sequence[Any] = ()
) -> Any:
    while bool(condition(*carried, *fixed)):
        carried = body(*carried, *fixed)
    return tuple(carried)


def _map(body: Body, xs: Sequence[Tensor], fixed: Sequence[Any] = ()) -> Any:
    return _stacked([body(*row, *fixed) for row in zip(*xs, strict=True)])


def _scan(
    body: Body, carried: Sequence[Any], xs: Sequence[Tensor], fixed: Sequence[Any] = ()
) -> Any:
    count, rows = len(carried), []
    for row in zip(*xs, strict=True):
        made = body(*carried, *row, *fixed)
        carried, kept = made[:count], made[count:]
        rows.append(kept)
    return (*carried, *_stacked(rows))


def _stacked(rows: Sequence[Sequence[Any]]) -> tuple[Any, ...]:
    """The results of each run of a body, along a new first dimension; None where it gives none."""
    return tuple(
        None if values[0] is None else torch.stack(values) for values in zip(*rows, strict=True)
    )


_EAGER: dict[Any, Callable[..., Any]] = {
    torch.ops.higher_order.cond: _cond,
    torch.ops.higher_order.while_loop: _while_loop,
    torch.ops.higher_order.scan: _scan,
    map_impl: _map,
}


class EagerBodies(TorchFunctionMode):
    """Runs each body operator by operator while gradients are computed."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Answer a call of control flow, and hand on all others."""
        eager = _EAGER.get(func) if torch.is_grad_enabled() else None
        if eager is None:
            return func(*args, **(kwargs or {}))
        with self:  # control flow inside of a body
            return eager(*args, **(kwargs or {}))


class _Entered(threading.local):
    """The modes of the calls that are under way in a thread, innermost last."""

    def __init__(self) -> None:
        self.modes: list[EagerBodies | None] = []


_entered = _Entered()


def enter_bodies(gm: GraphModule, args: Any) -> None:
    """A forward pre-hook: run the bodies of a prepared graph eagerly from here on."""
    is_wanted = PREPARED_KEY in gm.meta and not torch.compiler.is_compiling()
    mode = EagerBodies() if is_wanted else None
    if mode is not None:
        mode.__enter__()  # type: ignore[no-untyped-call]
    _entered.modes.append(mode)


def leave_bodies(gm: GraphModule, args: Any, outputs: Any) -> None:
    """A forward hook, called after an error too: what the pre-hook entered ends here."""
    mode = _entered.modes.pop() if _entered.modes else None
    if mode is not None:
        mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]


def install_eager_bodies(gm: GraphModule) -> None:
    """Have a graph with control flow run its bodies eagerly while it is prepared."""
    if bodies(gm) and enter_bodies not in gm._forward_pre_hooks.values():
        gm.register_forward_pre_hook(enter_bodies)
        gm.register_forward_hook(leave_bodies, always_call=True)
