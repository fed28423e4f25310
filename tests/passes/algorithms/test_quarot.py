"""QuaRot: the same function, no outlier channels, and refusals that name what is in the way."""

import pytest
import torch
from torch import nn

import pt2e_quant as pq
from pt2e_quant.core.errors import ConfigError, UnsupportedError
from pt2e_quant.core.provenance import provenance_of
from pt2e_quant.passes.algorithms.quarot import QuaRot

WIDTH = 48
IDS = torch.randint(0, 64, (2, 12), generator=torch.Generator().manual_seed(0))


class Written(nn.Module):
    """An RMS norm in elementary operators, as transformers has it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH) + 0.5)

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class Block(nn.Module):
    """A gated MLP and a residual."""

    def __init__(self, norm: type[nn.Module]) -> None:
        super().__init__()
        self.norm = norm() if norm is Written else norm(WIDTH)
        self.gate, self.up = (nn.Linear(WIDTH, 64, bias=False) for _ in range(2))
        self.down = nn.Linear(64, WIDTH)

    def forward(self, x):
        y = self.norm(x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


class Net(nn.Module):
    """A small language model whose embedding has one channel far beyond the others."""

    def __init__(self, norm=Written, *, tied=False, also=False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(64, WIDTH)
        self.blocks = nn.Sequential(Block(norm), Block(norm))
        self.norm = norm() if norm is Written else norm(WIDTH)
        self.head = nn.Linear(WIDTH, 64, bias=False)
        self.also = also
        with torch.no_grad():
            self.table.weight[:, 5] += 40.0
        if tied:
            self.head.weight = self.table.weight

    def forward(self, ids):
        x = self.blocks(self.table(ids))
        logits = self.head(self.norm(x)[:, -4:])
        return (logits, x.relu()) if self.also else logits


def prepared(model, recipe, *algorithms):
    quantizer = pq.backends.get("onnx").quantizer(recipe).remove_algorithm("balance_channels")
    program = torch.export.export(model.eval(), (IDS,))
    return pq.prepare_pt2e(program, quantizer, algorithms=algorithms)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("norm", [Written, nn.RMSNorm])
@pytest.mark.parametrize("settings", [QuaRot(), QuaRot(online_block=32, seed=4)])
def test_outputs_when_rotated_then_those_of_the_float_model(norm, tied, settings):
    model = Net(norm, tied=tied)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    gm = prepared(model, "a8w4_g32", settings)
    torch.testing.assert_close(gm(IDS), model(IDS), rtol=2e-4, atol=2e-4)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_quarot_when_a_channel_is_an_outlier_then_nearer_at_8_bits_per_token():
    model = Net()
    plain, turned = (
        pq.convert_pt2e(prepared(model, "int8_dynamic", *algorithms))
        for algorithms in ((), ("quarot",))
    )
    quality = [pq.sqnr_db([model(IDS)], [gm(IDS)]) for gm in (plain, turned)]
    assert quality[1] > quality[0] + 3
    assert any("is rotated in 1 tables and 2 linears" in n for n in provenance_of(turned).notes)


def test_quarot_when_the_stream_has_another_reader_then_refused_by_name():
    with pytest.raises(UnsupportedError, match="relu reads the residual stream, and is no RMS"):
        prepared(Net(also=True), "int8_dynamic", "quarot")


def test_quarot_when_norms_are_centred_then_refused():
    with pytest.raises(ConfigError, match="quarot applies to nothing"):
        prepared(Net(nn.LayerNorm), "int8_dynamic", "quarot")


def test_online_rotation_when_blocks_do_not_divide_then_declined():
    gm = prepared(Net(), "int8_dynamic", QuaRot(online_block=48))
    assert any("no whole number of blocks" in note for note in provenance_of(gm).notes)
