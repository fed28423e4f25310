"""A module that torch.compile runs as it is: packed weights and quantized tensors have no trace."""

import torch
from torch.fx import GraphModule


def opaque_to_compile(module: GraphModule) -> GraphModule:
    """Let `torch.compile` of a model around a module call it instead of tracing into it.

    Dynamo knows no quantized tensors (`int_repr`), and Inductor asks for oneDNN's packed weights as
    constants, which they are under `freezing` alone. A program (`CpuArtifact.program`) is traced.

    Args:
        module: is changed: its forward is marked.

    Returns:
        The module itself.
    """
    call = torch.compiler.disable(module.forward, reason="its weights are packed for oneDNN")  # type: ignore[no-untyped-call]  # torch's own
    setattr(module, "forward", call)  # noqa: B010  # an attribute of this module, not of its class
    return module
