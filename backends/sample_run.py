"""Run a graph once on a sample, and leave its buffers and the sample as they were."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from pt2e_quant.core.one_thread import one_thread
from pt2e_quant.core.read_capture import capture_of
from pt2e_quant.flow.calibrate.calibrate import preserve_buffers
from pt2e_quant.flow.calibrate.sample import Sample


def run_graph(gm: GraphModule, sample: Sample) -> list[Any]:
    """The flat result of a graph on a sample, on one thread; buffers are as before."""
    capture = capture_of(gm)
    return run_on_sample(gm, sample, lambda *leaves: gm(*capture.positional(leaves)))


def run_on_sample(gm: GraphModule, sample: Sample, call: Callable[..., Any]) -> list[Any]:
    """The flat result of a call on a sample's leaves, on one thread; buffers are as before."""
    with torch.no_grad(), one_thread(), preserve_buffers(gm, capture_of(gm)):
        found: list[Any] = pytree.tree_leaves(call(*copied_leaves(sample.leaves)))
    return found


def copied_leaves(leaves: Sequence[Any]) -> list[Any]:
    """Leaves for one call, which may write into its inputs."""
    return [v.clone() if isinstance(v, Tensor) else v for v in leaves]
