"""Experts that compute their own rows alone, in torch's words and in ONNX Runtime."""

import onnx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.export import Dim

import pt2e_quant as pq
from pt2e_quant.backends.onnx.passes.split_experts import split_experts
from pt2e_quant.graph.idioms.experts import JoinedRows, RowsOfExpert
from pt2e_quant.graph.pipeline import run_passes
from tests.mixture_of_experts import Mixture

ONNX = pq.backends.get("onnx")
RECIPES = ("int8", "int8_dynamic", "w8", "w4_g32", "a8w4_g32", "a16w8")

BOUNDS = {"a16w8": 3e-4, "a8w4_g32": 0.02}
"""A step of 16 bits; activations that ONNX Runtime rounds by group, and the graph by token."""


def rows(*sizes, seed=1):
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed))


def converted(form, recipe, *, tokens=9, is_fixed=False, **sizes):
    x = rows(1, tokens, 32)
    shapes = None if is_fixed else ({1: Dim("tokens", max=64)},)
    program = torch.export.export(Mixture(form, **sizes).eval(), (x,), dynamic_shapes=shapes)
    quantizer = ONNX.allowing_slower().quantizer(recipe)
    prepared = pq.prepare_pt2e(program, quantizer, effort="fast")
    return pq.convert_pt2e(pq.calibrate(prepared, [x], progress=False))


def parts_of(model, op_type):
    return [node for node in model.graph.node if node.op_type == op_type]


@settings(max_examples=40, deadline=None)
@given(data=st.data(), experts=st.integers(1, 6), width=st.integers(1, 5))
def test_composites_when_rows_are_split_and_joined_then_the_same_rows(data, experts, width):
    ids = torch.tensor(sorted(data.draw(st.lists(st.integers(0, experts - 1), min_size=1))))
    counts = torch.bincount(ids, minlength=experts)
    x, size = rows(len(ids), width), len(ids)
    parts = [RowsOfExpert(x, counts, at, size) for at in range(experts)]
    for at, part in enumerate(parts):
        count = int(counts[at])
        torch.testing.assert_close(part[:count], x[ids == at], rtol=0, atol=0)
        assert not part[count:].any()
    torch.testing.assert_close(JoinedRows(parts, counts, ids), x, rtol=0, atol=0)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("form", ["gathered", "turned"])
def test_split_experts_when_a_graph_is_quantized_then_its_values_stay(form, recipe):
    gm = converted(form, recipe)
    args = [rows(1, count, 32, seed=count) for count in (2, 9, 30)]
    expected = [gm(x) for x in args]
    (record,) = run_passes(gm, (split_experts,))
    assert [(note.skipped, note.text) for note in record.notes] == [
        (False, "8 experts compute their own rows")
    ]
    for x, before in zip(args, expected, strict=True):
        torch.testing.assert_close(gm(x), before, rtol=0, atol=1e-5)
    assert not run_passes(gm, (split_experts,))[0].changed


@pytest.mark.parametrize("recipe", RECIPES)
def test_artifact_when_the_number_of_tokens_varies_then_each_expert_has_its_rows(recipe, tmp_path):
    gm = converted("gathered", recipe)
    artifact = ONNX.lower(gm)
    artifact.save(tmp_path / "experts.onnx")
    split = parts_of(onnx.load(tmp_path / "experts.onnx"), "Split")
    assert [len(n.output) for n in split if len(n.input) == 2 and len(n.output) == 8] == [8]
    again = ONNX.load(tmp_path / "experts.onnx")
    for count in (2, 1, 40, 2):
        x = rows(1, count, 32, seed=count)
        expected = gm(x)
        for run in (artifact.run, again.run):
            torch.testing.assert_close(run(x), expected, rtol=0, atol=BOUNDS.get(recipe, 1e-5))


def test_artifact_when_it_has_one_token_then_its_experts_quantize_it_as_a_tensor():
    gm = converted("gathered", "int8_dynamic", tokens=1, is_fixed=True)
    artifact = ONNX.lower(gm)
    assert artifact.report.integer_ops["DynamicQuantizeMatMul"] == 16
    for seed in range(3):
        x = rows(1, 1, 32, seed=seed)
        torch.testing.assert_close(artifact.run(x), gm(x), rtol=0, atol=1e-5)


class Descending(torch.nn.Module):
    """Rows in the descending order of their experts."""

    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(rows(4, 6, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ids, order = x[:, :4].argmax(-1).sort(descending=True)
        return torch.bmm(self.w[ids], x[order].unsqueeze(-1)).squeeze(-1)


def test_split_experts_when_experts_are_in_descending_order_then_rows_are_sorted_first():
    x = rows(9, 8)
    quantizer = ONNX.allowing_slower().quantizer("w8")
    gm = pq.convert_pt2e(pq.prepare_pt2e(torch.export.export(Descending().eval(), (x,)), quantizer))
    expected = gm(x)
    assert run_passes(gm, (split_experts,))[0].changed
    torch.testing.assert_close(gm(x), expected, rtol=0, atol=1e-5)
