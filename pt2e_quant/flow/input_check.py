"""The input check of prepared and converted graphs, in place of torch's own.

The hooks that torch hangs on `ExportedProgram.module()` do not say what to export instead.
"""

from typing import Any

import torch
from torch.fx import GraphModule

from pt2e_quant.core.read_capture import CAPTURE_KEY

__all__ = ["check_inputs", "install_input_check"]

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


def install_input_check(gm: GraphModule) -> None:
    """Replace the hooks of torch.export by `check_inputs`; a user's own hooks stay."""
    for table in (gm._forward_pre_hooks, gm._forward_hooks):
        for key in [k for k, hook in table.items() if hook.__module__ == _TORCH_HOOKS]:
            del table[key]
    if check_inputs not in gm._forward_pre_hooks.values():
        gm.register_forward_pre_hook(check_inputs, with_kwargs=True)
        # A deep copy of a graph module has no hooks unless one of these puts them there.
        gm._register_deepcopy_hook(install_input_check)
