"""The migration guide: the code before and the code after both run, and give the same."""

import re
import warnings
from pathlib import Path

import pytest
import torch

from pt2e_quant.flow.calibrate.sample import sqnr_db

PAGE = (Path(__file__).resolve().parents[1] / "docs" / "migration.md").read_text()
PACKAGES = ("executorch", "onnxruntime", "onnxscript", "torchao")
EXACT = float("inf")
# Both sides round to 8 bits in their own way, each some 35 dB from the float result; dynamic int8
# here also quantizes otherwise than per whole tensor.
LEAST_DB = {
    "A PT2E script": EXACT,
    "FX graph mode": 28.0,
    "Eager mode": 28.0,
    "torchao `quantize_`": 35.0,
    "An ExecuTorch recipe": 28.0,
}


def sections():
    """Heading to (before, after), of those that have both."""
    found = {}
    for part in re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]:
        heading = part.partition("\n")[0]
        code = dict(re.findall(r"^(Before|After):\n\n```python\n(.*?)^```", part, re.M | re.S))
        if code:
            found[heading] = code["Before"], code["After"]
    return found


SETUP = re.search(r"^```python\n(.*?)^```", PAGE, re.M | re.S).group(1)


def run(code):
    names = {"__name__": "migration"}
    exec(compile(SETUP, "migration.md, model", "exec"), names)
    exec(compile(code, "migration.md", "exec"), names)
    with torch.no_grad():
        return names["result"], names["model"](names["x"])


def test_migration_guide_when_it_has_sections_then_each_is_compared():
    assert set(sections()) == set(LEAST_DB)


@pytest.mark.parametrize("heading", LEAST_DB)
@pytest.mark.filterwarnings("ignore")  # the other packages' own: deprecations, registrations
def test_migration_guide_when_code_before_and_after_runs_then_it_gives_the_same(
    heading, tmp_path, monkeypatch
):
    for package in PACKAGES:
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    before, after = sections()[heading]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        old, exact = run(before)
    new, _ = run(after)
    assert sqnr_db([old], [new]) >= LEAST_DB[heading]
    # Not worse than where it comes from, beyond chance on one batch.
    assert sqnr_db([exact], [new]) >= sqnr_db([exact], [old]) - 3.0
