"""Functions of 8-bit integers in a row, in a process of their own: XNNPACK ends it if it errs."""

import random
import subprocess
import sys

import pytest
import torch
from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import (
    XNNPACKQuantizer,
    get_symmetric_quantization_config,
)
from executorch.exir.dialects._ops import ops as exir_ops
from torch import Tensor, nn

import pt2e_quant as pq
from pt2e_quant.backends.xnnpack import lower
from pt2e_quant.backends.xnnpack.passes.lookup_chains import separate_functions

CHILD = """
import gc, sys
import torch
import torch.nn.functional as F
from torch import nn

import pt2e_quant as pq

class Chain(nn.Module):
    def __init__(self, text, size):
        super().__init__()
        torch.manual_seed(0)
        self.text, self.p = text, nn.Parameter(torch.rand(size) + 0.5)

    def forward(self, x):
        return eval(self.text, {"F": F, "torch": torch, "x": x, "p": self.p})

for line in sys.stdin.read().splitlines():
    text, size = line.split(";")
    torch.manual_seed(1)
    batches = [(torch.rand(2, 4) + 0.1,) for _ in range(4)]
    model = Chain(text, int(size)).eval()
    artifact = pq.quantize(
        model, args=batches[0], calibration_data=batches, backend="xnnpack", recipe="int8"
    )
    for batch in batches * 2:
        close = torch.allclose(artifact.run(*batch), model(*batch), atol=0.1)
        assert close, f"{line}: {artifact.run(*batch)} is not {model(*batch)}"
    del artifact
    gc.collect()
    print("right", line, flush=True)
"""

LONG = "x.sqrt()" + ".tanh().sigmoid().sqrt()" * 4


def _run(lines):
    made = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CHILD],
        input="\n".join(lines),
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    right = [line for line in made.stdout.splitlines() if line.startswith("right")]
    assert (made.returncode, len(right)) == (0, len(lines)), f"{right}\n{made.stderr[-2000:]}"


@pytest.mark.slow
def test_separate_functions_when_xnnpack_would_fuse_them_wrongly_then_right_results():
    _run(
        [
            "x.sqrt().tanh() * p;1",
            "p - x.sqrt().tanh();4",
            "F.silu(x * p) * p;1",
            "x.sqrt().tanh().unsqueeze(0) * p;4",
            f"{LONG} * p;4",
            f"{LONG} @ p.view(4, 1);4",
        ]
    )


class Shifted(nn.Module):
    """A sum with a constant behind a slice: XNNPACKQuantizer gives the two unlike scales."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 16, 1)

    def forward(self, x: Tensor) -> Tensor:
        return (self.conv(x)[:, 1::2] + 2).sigmoid().log().flatten(1).sum(-1) + 0.5


def test_separate_functions_when_a_constant_is_behind_a_requantization_then_apart(monkeypatch):
    graphs = []

    def separated(gm):
        result = separate_functions(gm)
        graphs.append(gm)
        return result

    monkeypatch.setattr(lower, "separate_functions", separated)
    torch.manual_seed(0)
    x = torch.randn(4, 8, 4, 4)
    sizes = ({0: torch.export.Dim("batch", max=16)},)
    program = torch.export.export(Shifted().eval(), (x,), dynamic_shapes=sizes)
    config = get_symmetric_quantization_config(is_per_channel=True)
    prepared = pq.prepare_pt2e(program, XNNPACKQuantizer().set_global(config))
    gm = pq.convert_pt2e(pq.calibrate(prepared, [(x,)] * 2, progress=False))
    artifact = pq.backends.get("xnnpack").lower(gm)
    assert torch.allclose(artifact.run(x[:2]), gm(x[:2]), atol=1e-3)
    edge = exir_ops.edge
    (first, *_) = [n for n in graphs[0].graph.nodes if n.target is edge.aten.add.Tensor]
    node, seen = first.args[0], []
    while node.op == "call_function" and node.target is not edge.aten.slice_copy.Tensor:
        seen.append(node.target)
        node = node.args[0]
    assert edge.aten.view_copy.default in seen


@pytest.mark.slow
def test_separate_functions_when_chains_are_drawn_then_right_results():
    draw = random.Random(0)
    steps = (
        "F.relu({})",
        "({}).abs().sqrt()",
        "torch.tanh({})",
        "torch.sigmoid({})",
        "F.silu({})",
        "F.hardswish({})",
        "F.leaky_relu({})",
        "(({}) * p)",
        "(p + ({}))",
        "(({}) * x)",
        "({}).unsqueeze(0).squeeze(0)",
    )
    lines = []
    for _ in range(40):
        text = "(x * p)"
        for _ in range(draw.randint(2, 9)):
            text = draw.choice(steps).format(text)
        lines.append(f"{text} @ p.new_ones(4, 4);{draw.choice((1, 4))}")
    _run(lines)
