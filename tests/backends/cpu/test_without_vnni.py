"""Recipes on a CPU without VNNI, where 16-bit sums of oneDNN and _int_mm saturate silently."""

import json
import os
import subprocess
import sys

import pytest
import torch

from pt2e_quant.kernels.int8_linear.multiply_cpu import int_mm_is_exact
from pt2e_quant.kernels.onednn.exact_products import onednn_is_exact

RECIPES = ("int8", "int8_dynamic", "a8w4", "w8", "w4", "w4_g32")
PROBES = ("onednn_is_exact", "int_mm_is_exact")

SCRIPT = """
import json, sys
import torch
from torch import nn
import pt2e_quant as pq
from pt2e_quant.kernels.onednn.exact_products import onednn_is_exact
from pt2e_quant.kernels.int8_linear.multiply_cpu import int_mm_is_exact
from pt2e_quant.backends.cpu import policy

policy.measured_here = lambda op: {}
torch.set_num_threads(1)
probes = (onednn_is_exact, int_mm_is_exact)
found = {probe.__name__: probe() for probe in probes}
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32)).eval()
with torch.no_grad():
    model[0].weight.copy_(model[0].weight.abs() * 0.1 + 1.0)  # all sums are as large as they can be
x = torch.rand(20, 64) * 0.1 + 0.9
with torch.no_grad():
    exact = model(x)
for recipe in sys.argv[1:]:
    data = None if recipe != "int8" else [(x,)]
    try:
        artifact = pq.quantize(model, (x,), calibration_data=data, backend="cpu", recipe=recipe)
        found[recipe] = float(pq.sqnr_db(exact, artifact.run(x)))
    except pq.Pt2eQuantError as error:
        found[recipe] = str(error)
print(json.dumps(found))
"""


def run(isa):
    """What the script prints under a cap of oneDNN's instructions."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT, *RECIPES],
        env={**os.environ, "ONEDNN_MAX_CPU_ISA": isa},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.skipif(
    not (torch.backends.mkldnn.is_available() and onednn_is_exact()),
    reason="this machine has no VNNI to switch off",
)
def test_recipes_when_the_cpu_has_no_vnni_then_each_is_right_or_refused():
    assert int_mm_is_exact()
    capped = run("AVX2")
    assert [capped[probe] for probe in PROBES] == [False] * 2
    # What rounding alone leaves; saturated sums are at most 6 dB.
    assert capped["int8"] > 40
    assert capped["int8_dynamic"] > 40
    assert capped["a8w4"] > 20
    assert all(capped[recipe] > 20 for recipe in ("w8", "w4", "w4_g32"))  # in float
