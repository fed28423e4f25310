import pytest
import torch
from torch import nn

from pt2e_quant.graph.show import show
from pt2e_quant.passes.cleanup.inline_regions import inline_regions

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


class Linear(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)


class NoGrad(Linear):
    def forward(self, x):
        with torch.no_grad():
            y = self.fc(x)
            z = y + 1
        return y, z


def test_region_when_it_is_no_grad_then_inlined(program):
    p = program(NoGrad(), (X,))
    assert "wrap_with_set_grad_enabled" in p.text
    p.apply(inline_regions)
    p.shows(
        """
        x: f32[3, 4] = input
        linear: f32[3, 4] = linear(x, fc.weight, bias=fc.bias)
        add: f32[3, 4] = add(linear, 1)
        return (linear, add)
        """
    )
    assert list(dict(p.gm.named_children())) == ["fc"]
    p.matches().is_idempotent(inline_regions)


class Autocast(Linear):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.conv = nn.Conv1d(4, 4, 1)

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.norm(self.fc(self.fc(x)))
            with torch.autocast("cpu", enabled=False):
                z = self.fc(x)
            s = (y @ z.T).softmax(-1)
            c = self.conv(z.unsqueeze(-1)).squeeze(-1)
            return torch.cat([c, z], -1), s, y * z


def test_region_when_it_is_autocast_then_its_casts_are_written_out(program):
    p = program(Autocast(), (X,)).apply(inline_regions)
    p.shows(
        """
        x: f32[3, 4] = input
        to: bf16[3, 4] = to(x, bf16)
        to_1: bf16[4, 4] = to(fc.weight, bf16)
        to_2: bf16[4] = to(fc.bias, bf16)
        linear: bf16[3, 4] = linear(to, to_1, bias=to_2)
        linear_1: bf16[3, 4] = linear(linear, to_1, bias=to_2)
        layer_norm: bf16[3, 4] = layer_norm(linear_1, [4], weight=norm.weight, bias=norm.bias, cudnn_enable=False)
        linear_2: f32[3, 4] = linear(x, fc.weight, bias=fc.bias)
        numpy_T: f32[4, 3] = numpy_T(linear_2)
        to_3: bf16[4, 3] = to(numpy_T, bf16)
        matmul: bf16[3, 3] = matmul(layer_norm, to_3)
        softmax: bf16[3, 3] = softmax(matmul, -1)
        unsqueeze: f32[3, 4, 1] = unsqueeze(linear_2, -1)
        to_4: bf16[3, 4, 1] = to(unsqueeze, bf16)
        to_5: bf16[4, 4, 1] = to(conv.weight, bf16)
        to_6: bf16[4] = to(conv.bias, bf16)
        conv1d: bf16[3, 4, 1] = conv1d(to_4, to_5, bias=to_6)
        squeeze: bf16[3, 4] = squeeze(conv1d, -1)
        cat: f32[3, 8] = cat([squeeze, linear_2], dim=-1)
        mul: f32[3, 4] = mul(layer_norm, linear_2)
        return (cat, softmax, mul)
        """  # noqa: E501
    )
    p.matches(rtol=0, atol=0).is_idempotent(inline_regions)


def test_regions_when_nested_in_regions_and_branches_then_all_inlined(program):
    class Nested(Autocast):
        def forward(self, x):
            with torch.no_grad():
                first = super().forward(x)

                def then(v):
                    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
                        return self.fc(v).float()

                return first, torch.cond(x.sum() > 0, then, lambda v: v - 1, (x,))

    p = program(Nested(), (X,)).apply(inline_regions)
    assert "wrap_with" not in p.text
    assert p.text.count("true_graph_0:") == 1
    p.matches((-X.abs(),), (X.abs(),), rtol=0, atol=0)


def test_branch_when_inside_autocast_then_it_is_cast(program):
    class Branch(Linear):
        def forward(self, x):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                y = torch.cond(x.sum() > 0, lambda v: self.fc(v).float(), lambda v: v - 1, (x,))
                return y + 1

    p = program(Branch(), (X,)).apply(inline_regions)
    assert "wrap_with" not in p.text
    p.matches((-X.abs(),), (X.abs(),), rtol=0, atol=0)


def test_regions_when_shapes_are_symbolic_then_they_survive(program):
    rows = torch.export.Dim("rows", min=2, max=9)
    p = program(Autocast(), (X,), ({0: rows},)).apply(inline_regions)
    assert "linear: bf16[s0, 4]" in p.text
    p.matches((torch.randn(7, 4),), rtol=0, atol=0)


def test_region_when_it_writes_a_buffer_then_the_write_is_kept(program):
    class Counts(Linear):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.zeros(1))

        def forward(self, x):
            with torch.no_grad():
                self.count.add_(1)
                return self.fc(x) + self.count

    p = program(Counts(), (X,)).apply(inline_regions)
    assert "add_(count, 1)" in p.text
    p.matches()


def test_input_when_a_region_returns_it_then_read_directly(program):
    class Returns(Linear):
        def forward(self, x):
            with torch.no_grad():
                y = self.fc(x)
                z = x
            return y + z, z * 2

    p = program(Returns(), (X,)).apply(inline_regions)
    assert "wrap_with" not in p.text
    p.matches()


def test_graph_when_it_has_no_regions_then_left_alone():
    gm = torch.export.export(nn.Linear(4, 4), (X,)).module()
    before = show(gm)
    assert not inline_regions(gm).changed
    assert show(gm) == before


def test_nodes_when_their_region_is_inlined_then_keep_their_traces(program):
    p = program(NoGrad(), (X,)).apply(inline_regions)
    linear = next(n for n in p.gm.graph.nodes if n.name.startswith("linear"))
    assert list(linear.meta["nn_module_stack"].values())[-1][0] == "fc"
    assert "self.fc(x)" in linear.meta["stack_trace"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_when_operands_are_doubles_then_no_cast_is_written(program, dtype):
    class Double(nn.Module):
        def forward(self, x):
            with torch.autocast("cpu", dtype=dtype):
                return x @ x.T

    p = program(Double(), (X.double(),)).apply(inline_regions)
    assert "to(" not in p.text
    p.matches(rtol=0, atol=0)
