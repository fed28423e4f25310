"""Recurrent layers on CPUs: which run in integers, and what a match becomes."""

from operator import getitem

import torch
from torch.fx import Node

from pt2e_quant.graph.ops import arguments
from pt2e_quant.graph.pattern import Match
from pt2e_quant.graph.recurrent_pattern import recurrent_row
from pt2e_quant.kernels.cost import Cost
from pt2e_quant.kernels.kernel import Device, Kernel
from pt2e_quant.kernels.onednn.exact_products import onednn_is_exact
from pt2e_quant.kernels.quantized_values import read_weight
from pt2e_quant.kernels.recurrent_layer.op import RecurrentLayerInt8, cost
from pt2e_quant.kernels.site import Site

_ROW = recurrent_row(
    "aten.quantized_lstm, aten.quantized_gru; aten.lstm, gru, rnn on weights decoded at load",
    "x and the hidden state are rounded to uint8 at run time, also in static recipes; an RNN, "
    "a layer with a projection, and an LSTM that the policy keeps float have int8 weights in the "
    "file alone, decoded once, when the module is made",
)


def has_integer_layers() -> bool:
    """True if torch multiplies a recurrent layer's integers exactly on this machine."""
    return onednn_is_exact() and "fbgemm" in torch.backends.quantized.supported_engines


def _class(match: Match) -> str:
    named = arguments(match.nodes["op"])
    return f"{named['cell']}, {named['rounding']}"


def build(site: Site) -> Node:
    """`recurrent_layer_int8` on the stored integers."""
    call = site.match.nodes["op"]
    operands = {name: site.match[name] for name in ("x", "h0", "c0", "b_ih", "b_hh")}
    held = {n: site.editor.now(v) if isinstance(v, Node) else v for n, v in operands.items()}
    named = arguments(call)
    made = site.editor.call(
        RecurrentLayerInt8,
        held["x"],
        held["h0"],
        held["c0"],
        *_weight(site, "w_ih"),
        *_weight(site, "w_hh"),
        held["b_ih"],
        held["b_hh"],
        *_weight(site, "w_hr"),
        named["cell"],
        named["is_reverse"],
        named["rounding"],
        like=call,
        before=call,
        val=call.meta["val"],
    )
    y, c = (site.editor.call(getitem, made, i, like=call, before=call) for i in (0, 1))
    for user in list(call.users):
        if user.args[1] == 1:
            site.editor.replace(user, c)
    site.editor.discard([c])
    return y


def _weight(site: Site, name: str) -> tuple[Node | None, Node | None]:
    weight = read_weight(site.gm, site.match[name])
    if weight is None:  # the row's scheme says that it is missing, not that it is float
        return None, None
    return site.integers(name), site.constant(f"{name}_scale", weight.scale)


def _cost(node: Node) -> Cost:
    call = node.args[0]
    assert isinstance(call, Node)  # the result of a call, by construction
    named = arguments(call)
    x, w_ih, w_hh = (named[name].meta["val"] for name in ("x", "w_ih", "w_hh"))
    return cost(x, w_ih, w_hh, node.meta["val"])


KERNELS = (
    Kernel(
        row=_ROW,
        device=Device.CPU,
        op="recurrent_layer",
        build=build,
        shape_class=_class,
        # What a backend's policy finds slower is not rounded, and runs as the float layer does.
        measured={"any": 1.0},
        cost=_cost,
    ),
)
