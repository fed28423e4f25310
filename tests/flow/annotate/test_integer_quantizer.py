"""Every operator that has an integer form, quantized."""

import pytest
import torch
from torch import nn
from torch.export import export
from torch.nn import functional

import pt2e_quant as pq
from pt2e_quant.core.errors import ConfigError, UnsupportedError
from pt2e_quant.core.qdq import is_quantize, read_qparams
from pt2e_quant.observers.training.fake_quantize import disable_observer
from tests.parameters import named_subset


class Mixed(nn.Module):
    def __init__(self, has_attention):
        super().__init__()
        self.has_attention = has_attention
        self.up = nn.ConvTranspose2d(4, 8, 2, 2)
        self.grouped = nn.ConvTranspose2d(8, 8, 2, 2, groups=2)
        self.norm = nn.GroupNorm(2, 8)
        self.qkv = nn.Linear(8, 24)
        self.register_buffer("mixing", torch.randn(8, 8))

    def forward(self, x):
        x = self.norm(self.grouped(self.up(x))).flatten(2).transpose(1, 2)
        q, k, v = self.qkv(x).chunk(3, -1)
        if self.has_attention:
            return functional.scaled_dot_product_attention(q, k, v) @ self.mixing
        return (torch.tanh(q) * k + v) @ self.mixing


def prepared(model, quantizer, *inputs):
    return pq.prepare_pt2e(export(model.eval(), inputs), quantizer, int_only=True)


@pytest.mark.parametrize(("bits", "has_attention"), [(8, True), (16, False)])
def test_integer_quantizer_when_all_operators_have_forms_then_none_is_float(bits, has_attention):
    torch.manual_seed(0)
    model, x = Mixed(has_attention), torch.randn(2, 4, 3, 3)
    made = prepared(model, pq.IntegerQuantizer(bits), x)
    quantized = pq.convert_pt2e(pq.calibrate(made, [x], progress=False))
    assert pq.audit(quantized).is_integer_only
    with torch.no_grad():
        expected, simulated = model(x), quantized(x)
        found = pq.integer_reference(quantized)(x)
    assert pq.sqnr_db(expected, found) > pq.sqnr_db(expected, simulated) - 1


def test_integer_quantizer_when_a_pool_chooses_values_then_they_keep_their_scale():
    x = torch.linspace(-4, 1, 64).reshape(1, 1, 8, 8)
    made = prepared(nn.MaxPool2d(2), pq.IntegerQuantizer(), x)
    quantized = pq.convert_pt2e(pq.calibrate(made, [x], progress=False))
    scales = {
        read_qparams(quantized, node).scale_float
        for node in quantized.graph.nodes
        if is_quantize(node)
    }
    assert len(scales) == 1


class Clamps(nn.Module):
    """A relu behind a convolution, a relu6 behind a sum, a relu whose input is read twice."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 1)

    def forward(self, x):
        x = torch.relu(self.first(x))
        x = functional.relu6(self.second(x) + x)
        y = self.second(x)
        return torch.relu(y) + y


def test_integer_quantizer_when_a_clamp_follows_an_operator_then_both_round_once():
    x = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    made = prepared(Clamps(), pq.IntegerQuantizer(), x)
    quantized = pq.convert_pt2e(pq.calibrate(made, [x], progress=False))
    ends = {n.args[0].name for n in quantized.graph.nodes if is_quantize(n)}
    assert {"relu", "relu6", "conv2d_2", "relu_1"} <= ends
    assert not ends & {"conv2d", "add"}
    assert pq.audit(quantized).is_integer_only


class Tokens(nn.Module):
    """A token of its own before those of the input, and an unbind: the ends of a ViT's block."""

    def __init__(self):
        super().__init__()
        self.token, self.qkv = nn.Parameter(torch.randn(1, 1, 8)), nn.Linear(8, 24)

    def forward(self, x):
        x = self.qkv(torch.cat([self.token.expand(x.shape[0], -1, -1), torch.tanh(x)], 1))
        q, k, v = x.reshape(*x.shape[:2], 3, 8).unbind(2)
        return functional.scaled_dot_product_attention(q, k, v)


def test_integer_quantizer_when_a_constant_is_joined_and_parts_unbound_then_none_is_float():
    torch.manual_seed(0)
    x = torch.randn(2, 4, 8)
    made = prepared(Tokens(), pq.IntegerQuantizer(), x)
    quantized = pq.convert_pt2e(pq.calibrate(made, [x], progress=False))
    assert pq.audit(quantized).is_integer_only
    with torch.no_grad():
        expected = quantized(x)
        assert pq.sqnr_db(expected, pq.integer_reference(quantized)(x)) > 25


def test_integer_quantizer_when_an_operator_has_no_form_then_names_it_before_data_is_seen():
    class Sums(nn.Module):
        def forward(self, x):
            return torch.cumprod(torch.sigmoid(x), 1)

    with pytest.raises(UnsupportedError, match=r"aten\.cumprod has no integer form"):
        prepared(Sums(), pq.IntegerQuantizer(), torch.randn(2, 8))


def test_integer_quantizer_when_the_bits_are_others_then_says_which_there_are():
    with pytest.raises(ConfigError, match="4, 8 or 16"):
        pq.IntegerQuantizer(6)
    with pytest.raises(ConfigError, match=r"2 \.\. 8 bits, found 9"):
        pq.IntegerQuantizer(weight_bits=9)


def test_integer_quantizer_when_bits_are_four_then_integers_reach_seven():
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(0))
    made = prepared(nn.Linear(16, 8), pq.IntegerQuantizer(4, weight_bits=4), x)
    quantized = pq.convert_pt2e(pq.calibrate(made, [x], progress=False))
    limits = [n.args[3:5] for n in quantized.graph.nodes if is_quantize(n)]
    assert limits == [(-8, 7), (-8, 7)]
    assert pq.sqnr_db(quantized(x), pq.integer_reference(quantized)(x)) > 20


class Residual(nn.Module):
    """Two blocks whose residual stream has one channel far above the others."""

    def __init__(self, is_normed=True):
        super().__init__()
        self.start = nn.Linear(16, 16)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.norms = nn.ModuleList(
            nn.LayerNorm(16) if is_normed else nn.Identity() for _ in range(4)
        )
        with torch.no_grad():
            self.start.bias[3] = 200.0

    def forward(self, x):
        x = self.start(x)
        for norm, block in zip(self.norms, self.blocks, strict=True):
            x = x + functional.gelu(block(norm(x)))
        return x[..., :3]


@pytest.mark.parametrize("is_normed", [True, False])
def test_integer_quantizer_when_a_norm_reads_a_residual_stream_then_it_has_sixteen_bits(is_normed):
    torch.manual_seed(0)
    model, x = Residual(is_normed), torch.randn(8, 16)
    found = {}
    for bits in (8, 16):
        made = prepared(model, pq.IntegerQuantizer(residual_bits=bits), x)
        quantized = pq.convert_pt2e(pq.calibrate(made, [x], progress=False))
        dtypes = {n.meta["val"].dtype for n in quantized.graph.nodes if is_quantize(n)}
        assert dtypes == ({torch.int8, torch.int16} if is_normed and bits == 16 else {torch.int8})
        assert pq.audit(quantized).is_integer_only
        with torch.no_grad():
            simulated = quantized(x)
            exact = pq.integer_reference(quantized)(x)
        assert pq.sqnr_db(model(x), exact) > pq.sqnr_db(model(x), simulated) - 1
        found[bits] = pq.sqnr_db(model(x), exact)
    assert (found[16] > found[8] + 12) is is_normed


def test_integer_quantizer_when_a_stream_is_wide_then_products_read_eight_bits():
    model, x = Residual(), torch.randn(8, 16)
    made = prepared(model, pq.IntegerQuantizer(), x)
    quantized = pq.convert_pt2e(pq.calibrate(made, [x], progress=False))
    for node in quantized.graph.nodes:
        if node.target is torch.ops.aten.linear.default:
            assert node.args[0].args[0].meta["val"].dtype is torch.int8


@pytest.mark.parametrize("tracks", [False, True])
def test_integer_quantizer_when_norms_are_of_images_then_none_is_float(tracks):
    torch.manual_seed(0)
    norm = nn.InstanceNorm2d(4, affine=True, track_running_stats=tracks)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), norm, nn.PReLU(4), nn.Conv2d(4, 2, 1)).eval()
    batch = {0: torch.export.Dim("batch", min=1, max=8)}
    x = torch.randn(3, 3, 9, 9)
    program = export(model, (x,), dynamic_shapes=(batch,))
    made = pq.prepare_pt2e(program, pq.IntegerQuantizer(), int_only=True)
    quantized = pq.convert_pt2e(pq.calibrate(made, [x], progress=False))
    assert pq.audit(quantized).is_integer_only
    reference = pq.integer_reference(quantized)
    with torch.no_grad():
        assert pq.sqnr_db(model(x[:2]), reference(x[:2])) > 30


class Recurrent(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer, self.head = layer, nn.Linear(12, 4)

    def forward(self, x):
        return self.head(self.layer(x)[0].mean(1))


LAYERS = {
    "lstm": lambda: nn.LSTM(5, 6, bidirectional=True, batch_first=True),
    "gru": lambda: nn.GRU(5, 12, batch_first=True),
}


@pytest.mark.filterwarnings("ignore:The tensor attributes self:UserWarning")
@pytest.mark.parametrize("name", named_subset(LAYERS, "gru"))
@pytest.mark.slow  # long: others of its file run in CI
def test_integer_quantizer_when_layers_are_recurrent_then_none_is_float_and_they_train(name):
    torch.manual_seed(0)
    model, shapes = Recurrent(LAYERS[name]()), ({0: torch.export.Dim("batch", min=1, max=8)},)
    batches = [torch.randn(3, 6, 5) for _ in range(3)]
    x = batches[0]
    program = export(model.eval(), (x,), dynamic_shapes=shapes)
    made = pq.prepare_pt2e(program, pq.IntegerQuantizer(), int_only=True)
    quantized = pq.convert_pt2e(pq.calibrate(made, batches, progress=False))
    assert pq.audit(quantized).is_integer_only
    with torch.no_grad():
        assert pq.sqnr_db(model(x), pq.integer_reference(quantized)(x)) > 30
    program = export(model.train(), (x,), dynamic_shapes=shapes)
    trained = pq.prepare_qat_pt2e(program, pq.IntegerQuantizer(), numerics="integer")
    for batch in batches:
        trained(batch).square().mean().backward()
    assert all(bool((p.grad != 0).any()) for p in trained.parameters())
    trained.eval().apply(disable_observer)
    expected = trained(x)
    assert torch.equal(pq.integer_reference(pq.convert_pt2e(trained))(x), expected)


@pytest.mark.filterwarnings("ignore:The tensor attributes self:UserWarning")
def test_integer_quantizer_when_a_sequence_is_long_then_the_remedy_says_how_many_steps():
    program = export(nn.GRU(4, 6).eval(), (torch.randn(65, 1, 4),))
    with pytest.raises(UnsupportedError, match=r"recurrent_layer stays float(.|\n)*up to 64 steps"):
        pq.prepare_pt2e(program, pq.IntegerQuantizer(), int_only=True)


class CastNorm(nn.Module):
    """An RMS norm that casts to be safe, as language models have it."""

    def __init__(self):
        super().__init__()
        self.weight, self.head = nn.Parameter(torch.ones(8)), nn.Linear(8, 8)

    def forward(self, x):
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.head(self.weight * y.to(x.dtype)) + x


def test_integer_quantizer_when_casts_change_nothing_then_training_has_no_island():
    x = torch.randn(4, 8)
    trained = pq.prepare_qat_pt2e(export(CastNorm(), (x,)), pq.IntegerQuantizer())
    trained(x)
    assert pq.audit(pq.convert_pt2e(trained)).is_integer_only
