"""Idioms as composite operators: what composes, what declines and why, and their decompositions."""

import pytest
import torch
from torch import nn

from pt2e_quant.graph.idioms.composite import compose_idioms
from pt2e_quant.graph.idioms.masks import MASK_RULES, AdditiveMask, AnySeen
from pt2e_quant.graph.idioms.rms_norm import RMS_NORM_RULES, RmsNorm, find_roots, is_normalized
from pt2e_quant.graph.idioms.rotary_embedding import RotaryEmbedding, rotary_rule
from pt2e_quant.graph.idioms.shared_heads import SHARED_HEADS_RULES, RegroupHeads
from pt2e_quant.graph.show import show

ROWS = torch.randn(3, 16, generator=torch.Generator().manual_seed(0))
HEADS = torch.randn(2, 6, 5, 8, generator=torch.Generator().manual_seed(1))
KEYS = torch.randn(2, 2, 5, 8, generator=torch.Generator().manual_seed(2))
ANGLES = torch.randn(1, 5, 4, generator=torch.Generator().manual_seed(3))


class Of(nn.Module):
    """A function as a module."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args):
        return self.function(*args)


def graph_of(function, *args):
    return torch.export.export(Of(function), args).module()


def llama_norm(x):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def t5_norm(x):
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-6)


def repeated_product(q, k):
    wide = k[:, :, None].expand(2, 2, 3, 5, 8).reshape(2, 6, 5, 8)
    return q @ wide.transpose(2, 3)


def rotation(x, angles):
    angles = torch.cat((angles, angles), -1)
    turned = torch.cat((-x[..., 4:], x[..., :4]), -1)
    return x * angles.cos()[:, None] + turned * angles.sin()[:, None]


def mask(x):
    return ((x > 0).float() - 1.0) * 1e30


def rows_seen(x):
    return (x > 0).any(-1, keepdim=True).float()


CASES = {
    "llama_norm": (RMS_NORM_RULES, llama_norm, (ROWS,), RmsNorm, 1),
    "t5_norm": (RMS_NORM_RULES, t5_norm, (ROWS,), RmsNorm, 1),
    "torch_norm": (RMS_NORM_RULES, nn.RMSNorm(16, eps=1e-6), (ROWS,), RmsNorm, 1),
    "mask": (MASK_RULES, mask, (ROWS,), AdditiveMask, 1),
    "rows_seen": (MASK_RULES, rows_seen, (ROWS,), AnySeen, 1),
    "heads": (SHARED_HEADS_RULES, repeated_product, (HEADS, KEYS), RegroupHeads, 2),
    "rotation": ((rotary_rule(),), rotation, (HEADS, ANGLES), RotaryEmbedding, 1),
}


@pytest.mark.parametrize("name", CASES)
def test_idiom_when_composed_then_one_operator_of_the_same_result(name):
    rules, function, args, operator, count = CASES[name]
    gm = graph_of(function, *args)
    assert compose_idioms(*rules)(gm).changed
    assert sum(node.target is operator for node in gm.graph.nodes) == count
    torch.testing.assert_close(gm(*args), function(*args), atol=2e-6, rtol=2e-6)
    assert not compose_idioms(*rules)(gm).changed


def test_rms_norm_when_composed_then_shown_in_one_line():
    gm = graph_of(llama_norm, ROWS)
    compose_idioms(*RMS_NORM_RULES)(gm)
    lines = [line for line in show(gm).splitlines() if "rms_norm" in line]
    assert lines[0] == "rms_norm: f32[3, 16] = pt2e_quant.rms_norm(args_0, [-1], 1e-06)"


@pytest.mark.parametrize(
    ("args", "operator"),
    [
        ((ROWS, [-1], 1e-6), RmsNorm),
        ((ROWS > 0, -1e30, torch.float32), AdditiveMask),
        ((ROWS > 0, -1, True, torch.float32), AnySeen),
        ((HEADS, 2), RegroupHeads),
        ((KEYS, 10), RegroupHeads),
        ((HEADS, ANGLES[0], ANGLES[0]), RotaryEmbedding),
    ],
)
def test_composite_operator_when_checked_then_schema_and_fake_kernel_agree(args, operator):
    torch.library.opcheck(operator, args, test_utils=("test_schema", "test_faketensor"))


def test_rms_norm_when_eps_is_computed_then_declines_with_the_reason():
    gm = graph_of(
        lambda x, e: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + e), ROWS, torch.rand(3, 1)
    )
    assert [n.text for n in compose_idioms(*RMS_NORM_RULES)(gm).notes] == [
        "eps is computed at run time"
    ]


def test_rotation_when_angles_differ_by_sequence_then_declines_with_the_reason():
    gm = graph_of(rotation, HEADS, torch.cat((ANGLES, ANGLES)))
    assert [n.text for n in compose_idioms(rotary_rule())(gm).notes] == [
        "its angles are not one row for each position, the same for both halves"
    ]


def test_roots_when_norms_are_written_out_then_each_is_found_with_what_it_is_of():
    def norms(x, w):
        spread = torch.sqrt(x.var(-1, unbiased=False, keepdim=True) + 1e-6)
        return w * x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6), (x - 1) / spread

    gm = graph_of(norms, ROWS, ROWS[0])
    roots = find_roots(gm.graph)
    assert [node.name for node in roots.values()] == ["args_0", "args_0"]
    assert [n.name for n in gm.graph.nodes if is_normalized(n, roots)] == ["mul_2", "div"]


def branches(x):
    return torch.cond(x.sum() > 0, llama_norm, lambda x: x + 1, (x,))


def test_compose_idioms_when_a_body_of_control_flow_has_one_then_it_composes_there():
    gm = graph_of(branches, ROWS)
    expected = gm(ROWS), gm(-ROWS)
    result = compose_idioms(*RMS_NORM_RULES).edit(gm)
    assert result.changed
    assert [note.node.split("/")[0] for note in result.notes] == ["true_graph_0"]
    assert "rms_norm" in gm.get_submodule("true_graph_0").code
    for found, wanted in zip((gm(ROWS), gm(-ROWS)), expected, strict=True):
        torch.testing.assert_close(found, wanted)
