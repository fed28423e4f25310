import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pt2e_quant.core.errors import UnsupportedError
from pt2e_quant.passes.cleanup.compute_in_float32 import compute_in_float32

FLOAT32 = compute_in_float32((torch.float32,))
# Results are rounded to bfloat16, half a step of 2^-7 at 1; float32 rounds nothing else visibly.
BFLOAT16 = {"rtol": 2**-6, "atol": 2**-6}


class Half(nn.Module):
    """Half precision by parameters, by casts, by creation, and by an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.head = nn.Linear(4, 4)
        self.head.weight = self.fc.weight

    def forward(self, x, mask):
        y = self.fc(x).float().softmax(-1).to(x.dtype)
        y = y + torch.zeros(4, dtype=x.dtype)
        return self.head(y.masked_fill(mask, torch.finfo(y.dtype).min).softmax(-1)), x


def half_case(dtype=torch.bfloat16):
    torch.manual_seed(0)
    return Half().to(dtype), (torch.randn(2, 4).to(dtype), torch.tensor([[False] * 3 + [True]]))


def test_linear_when_half_precision_then_computed_in_float32_between_casts(program):
    class Fc(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x):
            return self.fc(x)

    p = program(Fc().bfloat16(), (torch.randn(2, 4).bfloat16(),))
    p.apply(FLOAT32, keeps_outputs=False).shows(
        """
        x: bf16[2, 4] = input
        to: f32[2, 4] = to(x, f32)
        linear: f32[2, 4] = linear(to, fc.weight, bias=fc.bias)
        to_1: bf16[2, 4] = to(linear, bf16)
        return (to_1)
        """
    )
    p.matches(**BFLOAT16).leaves_model_alone()


def test_values_when_widened_then_all_are_float32_and_tied_ones_stay_tied(program):
    p = program(*half_case()).apply(FLOAT32, keeps_outputs=False)
    p.matches(**BFLOAT16).leaves_model_alone()
    dtypes = {n.name: n.meta["val"].dtype for n in p.gm.graph.nodes if n.op == "call_function"}
    casts = {n.name for n in p.gm.graph.output_node().all_input_nodes}
    assert {d for name, d in dtypes.items() if name not in casts} == {torch.float32}
    assert p.gm.fc.weight is p.gm.head.weight
    assert "bfloat16" in p.records[0].notes[0].text
    p.is_idempotent(FLOAT32)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_other_dtypes_when_parameters_have_them_then_float32(program, dtype):
    p = program(*half_case(dtype)).apply(FLOAT32, keeps_outputs=False)
    bound = 2**-9 if dtype is torch.float16 else 1e-6
    p.matches(rtol=bound, atol=bound)
    assert {t.dtype for t in p.gm.parameters()} == {torch.float32}


def test_dtypes_when_kept_or_absent_then_nothing_changes(program):
    kept = compute_in_float32((torch.float32, torch.bfloat16))
    assert not program(*half_case()).apply(kept).changed

    class Doubles(nn.Module):
        def forward(self, x):
            return x.double().cumsum(-1).float()

    assert not program(Doubles(), (torch.randn(3),)).apply(FLOAT32).changed


def test_numbers_when_beyond_float32_then_its_largest(program):
    class Lowest(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4, dtype=torch.float64))

        def forward(self, x, mask):
            return (x * self.scale).masked_fill(mask, torch.finfo(torch.float64).min).softmax(-1)

    _, inputs = half_case(torch.float64)
    program(Lowest(), inputs).apply(FLOAT32, keeps_outputs=False).matches(rtol=1e-6, atol=1e-6)


def test_input_when_the_model_writes_it_then_it_is_still_written(program):
    class Writes(nn.Module):
        def forward(self, x):
            x.mul_(2)
            return x + 1

    p = program(Writes(), (torch.ones(3).bfloat16(),)).apply(FLOAT32, keeps_outputs=False)
    x = torch.ones(3).bfloat16()
    assert torch.equal(p.gm(x), torch.full((3,), 3.0).bfloat16())
    assert torch.equal(x, torch.full((3,), 2.0).bfloat16())


def test_copy_when_a_cast_made_it_and_it_is_written_then_it_stays_a_copy(program):
    class Casts(nn.Module):
        def forward(self, x):
            y = x.to(torch.bfloat16)
            y.add_(1)
            return x + y

    x = torch.ones(3)
    program(Casts(), (x,)).apply(FLOAT32, keeps_outputs=False).matches(**BFLOAT16)
    assert torch.equal(x, torch.ones(3))


def test_branches_when_in_half_precision_then_float32_too(program):
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x):
            def yes(x):
                return F.linear(x, self.fc.weight, self.fc.bias).to(torch.bfloat16)

            return torch.cond(x.sum() > 0, yes, lambda x: x.clone(), (x,))

    p = program(Branches().bfloat16(), (torch.randn(2, 4).bfloat16(),))
    p.apply(FLOAT32, keeps_outputs=False).matches((torch.ones(2, 4).bfloat16(),), **BFLOAT16)
    body = p.gm.true_graph_0
    assert {n.meta["val"].dtype for n in body.graph.nodes if n.op != "output"} == {torch.float32}


def test_bits_when_read_then_refused_by_name(program):
    class Bits(nn.Module):
        def forward(self, x):
            return x.view(torch.int16) + 1

    with pytest.raises(UnsupportedError, match="reads the bits of floats") as caught:
        program(Bits(), (torch.ones(3).bfloat16(),)).apply(FLOAT32)
    assert "view" in str(caught.value.node_name)
    assert "model.float()" in str(caught.value)


def test_compute_in_float32_when_sizes_are_dynamic_then_other_sizes_match(program):
    model, (x, mask) = half_case()
    n = torch.export.Dim("n", min=1, max=9)
    p = program(model, (x, mask), ({0: n}, None)).apply(FLOAT32, keeps_outputs=False)
    p.matches((torch.randn(7, 4).bfloat16(), mask), **BFLOAT16)


@pytest.mark.parametrize(
    "power",
    [
        lambda x: torch.float_power(x.abs(), 1.5),
        lambda x: torch.float_power(x.abs(), x),
        lambda x: torch.float_power(2, x),
        lambda x: torch.float_power((x > 0).long(), 2),
    ],
    ids=["number", "tensor", "of a number", "of integers"],
)
def test_float_power_when_the_model_is_float64_then_it_gives_float32(program, power):
    class Raised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x):
            return self.fc(power(x))

    torch.manual_seed(0)
    p = program(Raised().double(), (torch.randn(2, 4).double(),))
    p.apply(FLOAT32, keeps_outputs=False).matches(rtol=1e-5, atol=1e-5)
    assert (
        p.gm.graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default)[0]
        .meta["val"]
        .dtype
        is torch.float32
    )
