"""Converted graphs and artifacts are as recorded: a few models always, all with `-m slow`.

Where a change is meant, record it: `python -m tests.digests.record PART_OF_A_KEY`.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.digests.choose_pairs import OTHERS, STATIC
from tests.digests.compare import changed_parts
from tests.digests.digest_case import Digest
from tests.digests.digest_graph import digest_graph, digest_tensor
from tests.digests.recorded import here, read_recorded

ROOT = Path(__file__).resolve().parents[2]
ALWAYS = ("drawn 00", "drawn 02", "drawn 04")


class TwoLayers(nn.Module):
    def __init__(self, first, last):
        super().__init__()
        self.names = first, last
        self.add_module(first, nn.Linear(4, 4))
        self.add_module(last, nn.Linear(4, 4))

    def forward(self, x):
        first, last = (getattr(self, name) for name in self.names)
        return last(first(x) + 0.5)


def graph_of(*names, seed=0):
    torch.manual_seed(seed)
    return torch.export.export(TwoLayers(*names), (torch.randn(2, 4),)).module()


def run_compare(*wanted):
    if read_recorded()[0]["torch"] != here()["torch"]:
        pytest.skip("recorded with another torch, which exports other graphs")
    # Not in this process: fixtures switch off what was measured.
    done = subprocess.run(
        [sys.executable, "-m", "tests.digests.compare", *wanted],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]


def test_digest_when_names_change_then_stays():
    assert digest_graph(graph_of("a", "b")) == digest_graph(graph_of("left", "right"))


def test_digest_when_constants_change_then_only_the_form_stays():
    one, other = graph_of("a", "b"), graph_of("a", "b", seed=1)
    assert digest_graph(one) != digest_graph(other)
    assert digest_graph(one, values=False) == digest_graph(other, values=False)


def test_digest_when_an_operator_is_made_twice_then_changes():
    gm = graph_of("a", "b")
    before = digest_graph(gm)
    node = next(n for n in gm.graph.nodes if n.op == "call_function")
    with gm.graph.inserting_after(node):
        gm.graph.node_copy(node, lambda n: n)
    assert digest_graph(gm) != before


def test_tensor_digest_when_one_bit_changes_then_changes():
    value = torch.zeros(3)
    assert digest_tensor(value) != digest_tensor(torch.tensor([0.0, -0.0, 0.0]))
    assert digest_tensor(value) != digest_tensor(value.reshape(3, 1))


def test_changed_parts_when_an_artifact_is_refused_then_names_what_is_gone():
    before = Digest(form="a", graph="b", program="c", results="d")
    assert changed_parts(before, Digest(form="a", graph="b", refused="lower: X")) == [
        "program",
        "results",
        "refused",
    ]


def test_recorded_digests_when_read_then_every_backend_and_recipe_family_is_there():
    _, digests = read_recorded()
    kept = {tuple(key.split(" / ")[1:]) for key, d in digests.items() if not d.refused}
    assert {*OTHERS, *STATIC} - kept == set()


def test_few_models_when_compared_then_nothing_changed():
    run_compare(*ALWAYS)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_whole_corpus_when_compared_then_nothing_changed():
    run_compare()
