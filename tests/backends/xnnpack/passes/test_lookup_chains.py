"""Functions of 8-bit integers in a row, in a process of their own: XNNPACK ends it if it errs."""

import random
import subprocess
import sys

import pytest

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
