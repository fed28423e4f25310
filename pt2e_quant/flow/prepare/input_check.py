"""The input check of prepared and converted graphs. It replaces torch's own.

The errors of torch's hooks on `ExportedProgram.module()` do not say what to export instead.
"""

from typing import Any

import torch
from torch.fx import GraphModule

from pt2e_quant.core.read_capture import CAPTURE_KEY
from pt2e_quant.flow.calibrate.sample import SAMPLE_KEY, Sample
from pt2e_quant.flow.prepare.eager_bodies import install_eager_bodies
from pt2e_quant.flow.prepare.prepared import PREPARED_KEY
from pt2e_quant.graph.alias import written_inputs

_TORCH_HOOKS = "torch.export._unlift"


def check_inputs(gm: GraphModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A forward pre-hook: refuse a call that the captured graph cannot take.

    Raises:
        InputError: with what to export instead.
    """
    capture = gm.meta.get(CAPTURE_KEY)
    # While torch traces, sizes are symbols: comparing them would write guards into the program.
    if capture is not None and not torch.compiler.is_compiling():
        capture.bind(args, kwargs)


def keep_sample(
    gm: GraphModule, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any
) -> None:
    """A forward hook: keep the first call of a prepared graph, with its float result.

    The check of the lowered artifact uses it where the user calls the prepared graph instead of
    `calibrate`. For graphs that write buffers or inputs only `calibrate` keeps a sample.
    """
    if SAMPLE_KEY in gm.meta or PREPARED_KEY not in gm.meta or torch.compiler.is_compiling():
        return
    capture = gm.meta.get(CAPTURE_KEY)
    is_float = not any(hasattr(module, "fake_quant_enabled") for module in gm.modules())
    if capture is None or capture.mutated_buffers or written_inputs(gm.graph):
        return
    if is_float:
        gm.meta[SAMPLE_KEY] = Sample.keep(capture.bind(args, kwargs), outputs)


def install_input_check(gm: GraphModule) -> None:
    """Replace the hooks of torch.export by those of this file; a user's own hooks stay."""
    for table in (gm._forward_pre_hooks, gm._forward_hooks):
        for key in [k for k, hook in table.items() if hook.__module__ == _TORCH_HOOKS]:
            del table[key]
    if check_inputs not in gm._forward_pre_hooks.values():
        gm.register_forward_pre_hook(check_inputs, with_kwargs=True)
        gm.register_forward_hook(keep_sample, with_kwargs=True)
        # A deep copy of a graph module has no hooks unless one of these puts them there.
        gm._register_deepcopy_hook(install_input_check)
        install_eager_bodies(gm)
