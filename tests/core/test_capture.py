"""The captured call: binding, refusals, dynamic dims, JSON."""

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.export import Dim, export

from pt2e_quant.core.capture import Capture
from pt2e_quant.core.errors import InputError
from pt2e_quant.core.export_dims import DimRange
from pt2e_quant.core.input_info import InputKind
from pt2e_quant.core.max_sizes import shown_sizes
from pt2e_quant.core.read_capture import capture_of
from pt2e_quant.flow.reexport import export_again


class Net(nn.Module):
    def forward(self, x: Tensor, mask=None, n=3, *, extra):
        return {"sum": x + n, "scaled": extra["q"] * 2, "none": None}


def _program(batch=4, **dims):
    return export(
        Net(),
        (torch.randn(batch, 4, 3), None, 7),
        {"extra": {"q": torch.randn(6, 3)}},
        dynamic_shapes={
            "x": {0: dims["x"]} if "x" in dims else None,
            "mask": None,
            "n": None,
            "extra": {"q": {0: dims["q"]} if "q" in dims else None},
        },
    )


def _capture(**dims):
    return capture_of(_program(**dims).module())


def _call(batch=4, rows=6):
    return {"x": torch.randn(batch, 4, 3), "n": 7, "extra": {"q": torch.randn(rows, 3)}}


def test_capture_when_read_then_has_names_paths_and_kinds():
    capture = _capture(x=Dim("b", min=2, max=64))
    assert capture.arg_names == ("x", "mask", "n", "extra")
    assert [i.path for i in capture.inputs] == ["x", "mask", "n", "extra['q']"]
    assert [i.kind for i in capture.inputs] == [
        InputKind.TENSOR,
        InputKind.LITERAL,
        InputKind.LITERAL,
        InputKind.TENSOR,
    ]
    (limits,) = capture.dims.values()
    assert (limits.minimum, limits.maximum, limits.hint) == (1, 64, 4)


@dataclass
class Rows:
    ids: Tensor
    parts: dict[str, Tensor]


torch.export.register_dataclass(Rows, serialized_type_name="tests.core.Rows")


def test_capture_when_a_dataclass_has_dynamic_sizes_then_exported_again_with_them():
    class OfRows(nn.Module):
        def forward(self, rows: Rows, more: list[Rows]) -> Tensor:
            return rows.ids + rows.parts["a"] + more[0].ids[0]

    def call(rows):
        made = Rows(torch.ones(rows, 2), {"a": torch.ones(rows, 2)})
        return made, [Rows(torch.ones(3, 2), {"a": torch.ones(rows, 2)})]

    size = {0: Dim("rows", min=1, max=8)}
    shapes = ([size, {"a": size}], [[None, {"a": size}]])
    gm = export(OfRows(), call(4), dynamic_shapes=shapes).module()
    again = export_again(gm).module()
    for rows in (4, 1, 8):
        torch.testing.assert_close(again(*call(rows)), torch.full((rows, 2), 3.0))


def test_bind_when_positional_or_by_keyword_then_the_same():
    capture = _capture()
    call = _call()
    by_name = capture.bind((), call)
    by_place = capture.bind((call["x"], None, 7, call["extra"]))
    assert all(a is b for a, b in zip(by_name, by_place, strict=True))
    assert capture.positional(by_name)[0] is call["x"]


def test_bind_when_a_literal_is_left_out_then_its_captured_value():
    call = _call()
    del call["n"]
    assert _capture().bind((), call)[2] == 7


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.randn(5, 4, 3)}, r'"x" has size 5 in dimension 0.*exactly 4'),
        ({"x": torch.randn(4, 4, 3).double()}, "dtype float64.*float32"),
        ({"x": torch.randn(4, 4)}, r"expected 3 dimensions: \(4, 4, 3\)"),
        ({"x": torch.randn(4, 3)}, r"with the batch dimension: x\[None\]"),
        ({"x": 3}, "must be a tensor, found int"),
        ({"n": 8}, '"n" is 8, the graph was captured with 7'),
        ({"extra": [torch.randn(6, 3)]}, "structure differs"),
        ({"other": 1}, r"unknown input \['other'\]: expected \(x, mask, n, extra\)"),
    ],
)
def test_bind_when_an_input_is_wrong_then_refused_with_the_fact(change, message):
    with pytest.raises(InputError, match=message):
        _capture().bind((), _call() | change)


class Pooled(torch.nn.Module):
    def forward(self, x):
        return x.mean((2, 3))


@pytest.mark.parametrize(
    ("captured", "given", "fix"),
    [
        ((1, 3, 8, 9), (1, 8, 9, 3), "x.movedim(-1, 1)"),
        ((1, 3, 8, 9), (5, 8, 9, 3), "x.movedim(-1, 1)"),
        ((1, 8, 9, 3), (1, 3, 8, 9), "x.movedim(1, -1)"),
        ((1, 3, 8, 9), (1, 9, 8, 3), "Dim.AUTO"),
        ((1, 3, 8, 9), (1, 3, 9, 8), "Dim.AUTO"),
    ],
)
def test_bind_when_channels_are_in_another_dimension_then_refused_with_the_move(
    captured, given, fix
):
    capture = capture_of(export(Pooled(), (torch.ones(captured),)).module())
    with pytest.raises(InputError) as error:
        capture.bind((torch.ones(given),), {})
    assert fix in str(error.value)


def test_bind_when_a_static_size_differs_then_refused_with_the_line_to_paste():
    with pytest.raises(InputError) as error:
        _capture(q=Dim("rows", min=2)).bind((), _call(batch=5))
    line = (
        "dynamic_shapes={'x': {0: torch.export.Dim.AUTO}, 'mask': None, 'n': None, "
        "'extra': {'q': {0: torch.export.Dim.AUTO}}}"
    )
    assert line in str(error.value)


def test_line_to_paste_when_pasted_then_other_sizes_bind():
    with pytest.raises(InputError) as error:
        _capture().bind((), _call(batch=5))
    text = str(error.value.fix)
    shapes = eval(text[text.index("{") : text.rindex("}") + 1], {"torch": torch})
    program = export(
        Net(),
        (torch.randn(4, 4, 3), None, 7),
        {"extra": {"q": torch.randn(6, 3)}},
        dynamic_shapes=shapes,
    )
    capture_of(program.module()).bind((), _call(batch=5))


def test_bind_when_inputs_are_missing_or_surplus_then_refused():
    with pytest.raises(InputError, match=r"missing input \['extra'\]"):
        _capture().bind((torch.randn(4, 4, 3),))
    with pytest.raises(InputError, match="5 positional inputs for a graph of 4"):
        _capture().bind((1, 2, 3, 4, 5))
    with pytest.raises(InputError, match="given twice"):
        _capture().bind((torch.randn(4, 4, 3),), _call())


@pytest.mark.parametrize("size", [0, 65])
def test_bind_when_a_size_is_outside_its_range_then_refused(size):
    capture = _capture(x=Dim("b", min=2, max=64))
    with pytest.raises(InputError, match="captured for 1 to 64"):
        capture.bind((), _call(batch=size))


def test_bind_when_equal_dims_differ_then_refused():
    dim = Dim("b", min=2, max=64)

    class Two(nn.Module):
        def forward(self, x, y):
            return x + y

    x = torch.randn(4, 3)
    program = export(Two(), (x, x.clone()), dynamic_shapes=({0: dim}, {0: dim}))
    capture = capture_of(program.module())
    with pytest.raises(InputError, match="must be equal"):
        capture.bind((torch.randn(3, 3), torch.randn(5, 3)))


@settings(max_examples=4)
@given(batch=st.integers(2, 9), low=st.integers(0, 2), span=st.integers(9, 90))
def test_capture_when_exported_again_then_ranges_stay(batch, low, span):
    high = low + span
    capture = _capture(batch=batch, x=Dim("b", min=low, max=high), q=Dim("rows"))
    args, kwargs = capture.example_inputs()
    program = export(Net(), args, kwargs, dynamic_shapes=capture.dynamic_shapes())
    again = capture_of(program.module())
    assert set(again.dims.values()) == set(capture.dims.values())


def test_capture_when_a_size_is_derived_then_its_relation_and_range_stay():
    class Halved(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x[:, ::2].sum() + x[1::2].sum()

    half = Dim("half", min=3, max=8)
    sizes = ({0: 2 * half, 1: 2 * half + 1},)
    gm = export(Halved(), (torch.ones(8, 9),), dynamic_shapes=sizes).module()
    capture = capture_of(export_again(gm).module())
    ((symbol, limits),) = capture.dims.items()
    assert capture.inputs[0].shape == (f"2*{symbol}", f"2*{symbol} + 1")
    assert (limits.minimum, limits.maximum) == (3, 8)


def test_capture_when_written_as_json_then_reads_back_equal():
    capture = _capture(x=Dim("b", min=2, max=64))
    assert Capture.from_json(capture.to_json()) == capture


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"arg_names": 3}', "null"])
def test_capture_when_its_json_is_damaged_then_refused(text):
    with pytest.raises(InputError, match="not the description of a captured call"):
        Capture.from_json(text)


def test_output_when_unflattened_then_the_models_own_structure():
    capture = _capture()
    out = capture.unflatten_output([1, 2, None])
    assert out == {"sum": 1, "scaled": 2, "none": None}


def test_dynamic_shapes_when_a_range_holds_one_size_then_it_is_fixed():
    x = torch.randn(3, 4)
    batch = torch.export.Dim("batch", min=1, max=8)
    ep = torch.export.export(torch.nn.Linear(4, 2), (x,), dynamic_shapes=({0: batch},))
    capture = capture_of(ep.module())
    (symbol,) = capture.dims
    fixed = replace(capture, dims={symbol: DimRange(minimum=3, maximum=3, hint=3)})
    assert fixed.dynamic_shapes() == {"input": {0: None}}


class _Halves(torch.nn.Module):
    def forward(self, x):
        return torch.tensor_split(x * 2.0, 2)[0]


def _halves(size=6):
    shapes = {"x": {0: Dim.AUTO}}
    x = torch.randn(size, 3)
    return export(_Halves(), (x,), dynamic_shapes=shapes).module(check_guards=False)


def test_bind_when_torch_took_only_multiples_then_other_sizes_are_refused():
    capture = capture_of(_halves())
    assert shown_sizes(capture) == ["x: (1 to any, multiples of 2, 3) float32"]
    assert Capture.from_json(capture.to_json()) == capture
    capture.bind((torch.randn(8, 3),))
    with pytest.raises(InputError, match="size 5 in dimension 0, which is not a multiple of 2"):
        capture.bind((torch.randn(5, 3),))


def test_capture_when_torchs_guards_leave_one_size_then_it_is_fixed():
    graph = _halves(2)
    assert shown_sizes(capture_of(graph)) == ["x: (2 to 2, 3) float32"]
    x = torch.randn(2, 3)
    assert torch.equal(export_again(graph).module()(x), _Halves()(x))


def test_export_again_when_torch_took_only_multiples_then_all_of_them_stay():
    program = export_again(_halves())
    assert not [n for n in program.graph.nodes if "assert" in str(n.target)]
    (limits,) = program.range_constraints.values()
    assert (limits.lower, limits.is_int) == (1, True)
    x = torch.randn(10, 3)
    assert torch.equal(program.module(check_guards=False)(x), _Halves()(x))


class _Cut(nn.Module):
    def forward(self, x):
        return x.flatten()[:3], x[:1], x[-1:]


class _Pair(nn.Module):
    def forward(self, x):
        return x[:2].sum(0)


def _captured_with(model, minimum):
    shapes = {"x": {0: torch.export.Dim("batch", min=minimum, max=9)}}
    return capture_of(
        torch.export.export(model, (torch.randn(4, 2),), dynamic_shapes=shapes).module()
    )


def test_capture_when_a_slice_has_fewer_rows_at_size_1_then_sizes_start_at_2():
    for minimum in (1, 2):
        capture = _captured_with(_Pair(), minimum)
        assert shown_sizes(capture) == ["x: (2 to 9, 2) float32"]
        with pytest.raises(InputError, match=r"captured for 2 to 9[^$]*such as x\[:2\]"):
            capture.bind((torch.randn(1, 2),))
    assert shown_sizes(_captured_with(_Cut(), 1)) == ["x: (2 to 9, 2) float32"]


def test_capture_when_a_slice_has_its_rows_at_size_1_then_sizes_start_there():
    class Row(nn.Module):
        def forward(self, x):
            return x[:1] + x[-1:] + x.flatten()[:2]

    assert shown_sizes(_captured_with(Row(), 1)) == ["x: (1 to 9, 2) float32"]
