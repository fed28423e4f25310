"""The range of torch's profiler that a fused operator's launch is in."""

import contextlib
from contextlib import AbstractContextManager

import torch
from torch.fx import Node

from pt2e_quant.core.errors import module_path


def label_of(node: Node) -> str:
    """A node's module path and name, as ranges and profiles have them."""
    return f"{module_path(node)} {node.name}".strip()


def profiler_range(op: str, label: str) -> AbstractContextManager[object]:
    """A range `pt2e_quant::<op> <module> <node> <layout>`; nothing while no profiler runs.

    Args:
        op: the fused operator.
        label: module path, node and layout.
    """
    if not torch._C._autograd._profiler_enabled():
        return contextlib.nullcontext()
    return torch.profiler.record_function(f"pt2e_quant::{op} {label}".rstrip())
