"""What ExecuTorch cannot run is refused before there is a file, by the user's line."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pt2e_quant as pq
from pt2e_quant.backends.xnnpack.passes.missing_kernels import refuse_missing_kernels
from pt2e_quant.core.errors import ArtifactError, Pt2eQuantWarning, UnsupportedError
from pt2e_quant.flow.calibrate.sample import sqnr_db
from tests.backends.call_saved import call_pte
from tests.call_function import Call


class Behind(nn.Module):
    """A linear, and an operator behind it."""

    def __init__(self, operator) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.operator = operator

    def forward(self, x: Tensor) -> Tensor:
        return self.operator(self.linear(x))


def lowered(model, x):
    return pq.quantize(model.eval(), args=(x,), calibration_data=[x], backend="xnnpack")


@torch.library.custom_op("pt2e_quant_tests::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    return x * 2


@doubled.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@pytest.mark.parametrize(
    ("model", "shape", "named"),
    [
        (Behind(doubled), (2, 8), "pt2e_quant_tests::doubled"),
        (Behind(lambda x: torch.nextafter(x, x + 1)), (2, 8), "nextafter"),
    ],
)
def test_lower_when_there_is_no_kernel_then_the_line_is_named(model, shape, named, make_noise):
    with pytest.raises(UnsupportedError) as raised:
        lowered(model, make_noise(shape))
    assert named in str(raised.value)
    assert raised.value.node_name is not None
    assert "source" in str(raised.value)


def test_refuse_missing_kernels_when_another_overload_has_one_then_refused():
    ep = torch.export.export(Behind(lambda x: torch.round(x, decimals=2)), (torch.ones(2, 8),))
    gm = ep.module()
    refuse_missing_kernels(gm, ["aten::round.out"])
    with pytest.raises(
        UnsupportedError, match=r"no kernel for aten::round\.decimals_out"
    ) as raised:
        refuse_missing_kernels(gm, ["aten::round.out", "aten::round.decimals_out"])
    assert raised.value.node_name == "round_1"


def test_refuse_missing_kernels_when_a_number_is_given_for_a_tensor_then_refused():
    ep = torch.export.export(Behind(lambda x: x * 2), (torch.ones(2, 8),))
    with pytest.raises(UnsupportedError, match=r"no kernel for aten::mul\.out") as raised:
        refuse_missing_kernels(ep.module(), ["aten::mul.out"], ["aten::mul.out"])
    assert raised.value.node_name == "mul"


def test_remainder_when_by_a_dynamic_size_then_torch_s_values():
    """Its kernel would be given the size for a tensor, at which the runtime ends the process."""

    class Places(nn.Module):
        def forward(self, x: Tensor):
            return x.relu(), torch.arange(8) % x.shape[0]

    batch = torch.export.Dim("batch", min=1, max=16)
    artifact = pq.quantize(
        Places().eval(),
        (torch.randn(4, 8),),
        calibration_data=[torch.randn(4, 8)],
        dynamic_shapes={"x": {0: batch}},
        backend="xnnpack",
        progress=False,
    )
    for rows in (4, 1, 16, 3):
        assert torch.equal(artifact.run(torch.randn(rows, 8))[1], torch.arange(8) % rows)


def test_run_when_the_runtime_stops_then_said_so(make_noise):
    x = make_noise((2, 8))
    artifact = lowered(Behind(F.relu), x)
    with pytest.raises(ArtifactError, match="ExecuTorch's runtime stopped"):
        artifact.run_leaves([torch.zeros(3, 8)])


def test_lower_when_a_root_of_a_dynamic_size_is_a_number_then_a_tensor_computes_it(make_noise):
    def scaled(x: Tensor) -> Tensor:
        rows = x.shape[0]
        return x / rows**0.5 + x * (2.0 / (rows**0.5 + 1.0)) - x * rows**-0.5

    model, x = Behind(scaled).eval(), make_noise((6, 8))
    rows = torch.export.Dim("rows", min=1, max=16)
    artifact = pq.quantize(
        model,
        args=(x,),
        dynamic_shapes=({0: rows},),
        calibration_data=[(x,), (x[:1],)],
        backend="xnnpack",
    )
    for given in (x, x[:1], x[:3], x):
        assert sqnr_db(model(given), artifact.run(given)) > 25


def test_lower_when_the_model_returns_no_tensor_then_refused(make_noise):
    model, x = Behind(lambda x: list(x[:, :0].unbind(1))), make_noise((2, 8))
    backend = pq.backends.get("xnnpack")
    program = torch.export.export(model.eval(), (x,))
    with pytest.warns(Pt2eQuantWarning, match="no tensor of this graph"):
        prepared = pq.prepare_pt2e(program, backend.quantizer(), strict=False)
    with pytest.raises(UnsupportedError, match="returns no tensor"):
        backend.lower(pq.convert_pt2e(prepared), (x,))


def test_remainder_when_of_negative_integers_then_it_has_the_divisors_sign(make_noise):
    class Places(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor, at: Tensor) -> tuple[Tensor, ...]:
            return self.linear(x), at % 11, at % -5, torch.remainder(at, at.abs() + 1)

    model, x, at = Places().eval(), make_noise((2, 8)), torch.arange(-20, 20)
    artifact = pq.quantize(
        model, args=(x, at), calibration_data=[(x, at)], backend="xnnpack", recipe="int8"
    )
    for expected, found in zip(model(x, at)[1:], artifact.run(x, at)[1:], strict=True):
        assert torch.equal(expected, found)


class Placed(nn.Module):
    """Rows at the places of a mask, as vision-language models of transformers put images."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        mask = ids == 1
        torch._check_tensor_all(mask.sum() == 2)
        rows = x.masked_scatter(mask[:, None].expand_as(x), torch.ones(2, 8))
        return torch.exp2(self.linear(rows)) * x.max().item()


def test_lower_when_values_are_checked_then_the_note_says_so(make_noise):
    model, x, ids = Placed().eval(), make_noise((4, 8)), torch.tensor([0, 1, 1, 0])
    data = [(x, ids)]
    artifact = pq.quantize(model, data[0], calibration_data=data, backend="xnnpack")
    assert artifact.report.integer_ops
    assert any("this check of values is not in the file" in n for n in artifact.report.notes)
    assert sqnr_db(model(x, ids), artifact.run(x, ids)) > 30.0


class Places(nn.Module):
    """Reads of rows and of elements at places of 32 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.table = nn.Linear(8, 8), nn.Embedding(9, 8)

    def forward(self, x: Tensor, places: Tensor) -> tuple[Tensor, ...]:
        y = self.linear(x)
        rows = self.table(places), y[:, places[0]], y.index_select(1, places[0])
        return y.gather(1, places), y.narrow_copy(-1, 2, 3), *rows


def test_places_when_of_32_bits_then_read_as_those_of_64(tmp_path):
    model, x = Places().eval(), torch.randn(2, 8)
    places = torch.tensor([[1, 5, 2], [0, 7, 7]])
    args = x, places.int()
    artifact = pq.quantize(model, args, calibration_data=[args], backend="xnnpack", progress=False)
    (found,) = call_pte(artifact, [args], tmp_path)
    for expected, made in zip(model(x, places), found, strict=True):
        assert sqnr_db(expected, made) > 25


HINTS = {
    "cast_without_waiting": lambda y: y.to(torch.float64, non_blocking=True).float(),
    "move_without_waiting": lambda y: (y > 0).to("cpu", torch.float32, True) * y,
    "zeros_in_a_layout": lambda y: torch.zeros_like(y, memory_format=torch.channels_last) + y,
    "copy_in_a_layout": lambda y: y.clone(memory_format=torch.channels_last),
}


@pytest.mark.parametrize("name", HINTS)
def test_hint_when_no_value_depends_on_it_then_it_is_dropped(name, make_noise):
    model = nn.Sequential(nn.Conv2d(3, 8, 1), Call(HINTS[name]), nn.Conv2d(8, 4, 1)).eval()
    x = make_noise((2, 3, 6, 6))
    assert sqnr_db(model(x), lowered(model, x).run(x)) > 30
