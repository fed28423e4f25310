"""Graphs that amplify rounding: what computes them otherwise is accepted, on any thread count."""

import copy
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
import torch.ao.quantization.fx._decomposed  # registers the operators
from torch import Tensor, nn
from torch.fx import GraphModule, Interpreter, Node

from pt2e_quant.backends.gate import check_artifact
from pt2e_quant.backends.rounding_noise import DRAWS, run_with_rounding_noise
from pt2e_quant.core.errors import ArtifactError
from pt2e_quant.core.one_thread import one_thread
from pt2e_quant.flow.calibrate.sample import Sample
from pt2e_quant.graph.editor import Editor

Q: Any = torch.ops.quantized_decomposed
TO_FLOAT_DB = 30.0


class Chaos(nn.Module):
    """Layers that each triple a difference, quantized in between: one step ends as a third."""

    gain = 3.0

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.weights = nn.Parameter(torch.randn(8, 64, 64, generator=generator) * (self.gain / 8))

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            q = Q.quantize_per_tensor(torch.sin(x @ weight), 0.008, 128, 0, 255, torch.uint8)
            x = Q.dequantize_per_tensor(q, 0.008, 128, 0, 255, torch.uint8)
        return x


class Steady(Chaos):
    """Layers that leave a difference as large as it was."""

    gain = 1.0


class InPieces(Interpreter):
    """Sums of products in pieces of so many terms, which another machine may choose otherwise."""

    terms = 8

    def run_node(self, n: Node) -> Any:
        if n.target is not torch.ops.aten.matmul.default:
            return super().run_node(n)
        left, right = self.fetch_args_kwargs_from_env(n)[0]
        pieces = zip(left.split(self.terms, -1), right.split(self.terms, -2), strict=True)
        return sum(a @ b for a, b in pieces)


@cache
def chaos(seed: int, kind: type[Chaos] = Chaos) -> tuple[GraphModule, Sample]:
    """A graph and a sample of which the plain rule asks for 35 dB."""
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(100 + seed))
    gm = torch.export.export(kind(seed).eval(), (x,)).module()
    Editor(gm).erase_dead([n for n in gm.graph.nodes if n.op == "call_module"])
    with torch.no_grad(), one_thread():
        out = gm(x)
    noise = torch.randn(out.shape, generator=torch.Generator().manual_seed(200 + seed))
    return gm, Sample(
        leaves=(x,), float_outputs=(out + noise * out.std() * 10 ** (-TO_FLOAT_DB / 20),)
    )


@pytest.fixture(params=[1, 2])
def threads(request) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def test_gate_when_sums_are_in_another_order_then_accepted(threads, artifact_of):
    amplified = 0
    for seed in range(6):
        gm, sample = chaos(seed)
        artifact = artifact_of(gm, lambda x, gm=gm: InPieces(gm).run(x, enable_io_processing=False))
        check_artifact(artifact, gm, sample, margin_db=6.0)
        amplified += any("amplifies" in note for note in artifact.report.notes)
    assert amplified >= 2, "the plain rule alone decided"


def test_gate_when_artifacts_are_draws_of_the_noise_then_one_in_17_is_refused(artifact_of):
    refused = 0
    for seed in range(34):
        gm, sample = chaos(seed % 3)

        def call(x: Tensor, gm: GraphModule = gm, draw: int = DRAWS + seed) -> Any:
            return run_with_rounding_noise(gm, x, draw=draw)

        try:
            check_artifact(artifact_of(gm, call), gm, sample, margin_db=6.0)
        except ArtifactError:
            refused += 1
    # Two are expected; 1.7 is the standard deviation, for artifacts of a graph share its bound.
    assert refused <= 2 + 3 * 1.7


def test_gate_when_a_layer_is_at_fault_then_refused_with_the_same_words(threads, artifact_of):
    gm, sample = chaos(0)
    broken = copy.deepcopy(gm)
    with torch.no_grad():
        broken.weights[3].mul_(1.1)
    artifact = artifact_of(gm, broken)
    with pytest.raises(ArtifactError, match="float rounding alone") as found:
        check_artifact(artifact, gm, sample, margin_db=6.0)
    with one_thread(), pytest.raises(ArtifactError) as alone:
        check_artifact(artifact, gm, sample, margin_db=6.0)
    assert str(found.value).split("expected")[1] == str(alone.value).split("expected")[1]
    assert torch.get_num_threads() == threads


def test_graph_when_checked_then_it_runs_on_one_thread_and_the_artifact_as_it_will(
    threads, artifact_of
):
    gm, sample = chaos(0)
    seen = {"graph": 0, "artifact": 0}

    def note(who: str) -> None:
        seen[who] = torch.get_num_threads()

    other = copy.deepcopy(gm)

    def run(x: Tensor) -> Tensor:
        note("artifact")
        with one_thread():
            return other(x)

    with gm.register_forward_pre_hook(lambda *_: note("graph")):
        check_artifact(artifact_of(gm, run), gm, sample, margin_db=6.0)
    assert seen == {"graph": 1, "artifact": threads}


class Stepped(Interpreter):
    """A runtime that rounds one value in twelve to its other neighbour."""

    def run_node(self, n: Node) -> Any:
        value = super().run_node(n)
        if n.target is not Q.quantize_per_tensor.default:
            return value
        generator = torch.Generator().manual_seed(len(n.name))
        moved = torch.rand(value.shape, generator=generator) < 1 / 12
        return (value.int() + moved.int()).clamp(0, 255).to(value.dtype)


def stepped(gm: GraphModule) -> Any:
    return lambda x: Stepped(gm).run(x, enable_io_processing=False)


def test_gate_when_steps_of_each_operator_add_up_then_accepted_with_a_note(artifact_of):
    gm, sample = chaos(0, Steady)
    artifact = artifact_of(gm, stepped(gm))
    lowered: list[str] = []

    def lower(part: GraphModule) -> Any:
        lowered.append(str(part.graph.output_node().args[0]))
        return artifact_of(part, stepped(part))

    check_artifact(artifact, gm, sample, margin_db=6.0, lower_part=lower)
    # The sample is run again behind the other calls, and differs again.
    assert len(lowered) == len(set(lowered)) > 0
    assert any("other neighbour" in note for note in artifact.report.notes)
    with pytest.raises(ArtifactError):
        check_artifact(artifact, gm, sample, margin_db=6.0)
