import pytest
import torch
from torch import nn
from torch.export import Dim, export

from pt2e_quant.command_line.data_file import Data
from pt2e_quant.command_line.make_batches import make_batches
from pt2e_quant.core.errors import InputError
from pt2e_quant.core.read_capture import rebuild_capture


class Two(nn.Module):
    def forward(self, x, table, flag=None):
        return x @ table if flag is None else x


class Nested(nn.Module):
    def forward(self, z, rest):
        return z["q"] + rest[0]


def capture_of_call(model, *args, dynamic_shapes=None, **kwargs):
    ep = export(model, args, kwargs, dynamic_shapes=dynamic_shapes)
    return rebuild_capture(ep.module())


def split(capture, arrays, **options):
    made = make_batches(Data(label="data.npz", arrays=arrays), capture, **options)
    return list(made.batches)


def relu(batch, *, is_dynamic=False):
    shapes = ({0: Dim("b", min=1, max=64)},) if is_dynamic else None
    return capture_of_call(nn.ReLU(), torch.zeros(batch, 3), dynamic_shapes=shapes)


def test_split_when_the_first_dimension_is_fixed_then_cut_at_its_size():
    x = torch.arange(18.0).reshape(6, 3)
    pieces = split(relu(2), {"input": x})
    assert [tuple(p["input"].shape) for p in pieces] == [(2, 3)] * 3
    assert torch.equal(torch.cat([p["input"] for p in pieces]), x)


@pytest.mark.parametrize(("size", "expected"), [(None, [4, 1]), (2, [2, 2, 1]), (5, [5])])
def test_split_when_the_first_dimension_is_dynamic_then_cut_at_batch_size(size, expected):
    pieces = split(relu(4, is_dynamic=True), {"input": torch.zeros(5, 3)}, batch_size=size)
    assert [len(p["input"]) for p in pieces] == expected


def test_split_when_max_batches_is_given_then_the_first_ones():
    pieces = split(relu(1), {"input": torch.arange(12.0).reshape(4, 3)}, max_batches=2)
    assert [float(p["input"][0, 0]) for p in pieces] == [0.0, 3.0]


def test_split_when_there_is_one_more_dimension_then_an_entry_is_an_input():
    capture = capture_of_call(Two(), torch.zeros(1, 3), torch.zeros(3, 2))
    arrays = {"x": torch.zeros(4, 3), "table": torch.rand(4, 3, 2)}
    pieces = split(capture, arrays)
    assert len(pieces) == 4
    assert torch.equal(pieces[3]["table"], arrays["table"][3])


def test_split_when_numbers_of_batches_differ_then_refused():
    capture = capture_of_call(Two(), torch.zeros(1, 3), torch.zeros(3, 2))
    arrays = {"x": torch.zeros(4, 3), "table": torch.zeros(3, 2)}
    with pytest.raises(InputError, match="4 for x, 1 for table") as caught:
        split(capture, arrays)
    assert "one more axis in front" in caught.value.fix


def test_split_when_inputs_are_nested_then_named_with_dots():
    capture = capture_of_call(Nested(), {"q": torch.zeros(1, 2)}, [torch.zeros(1, 2)])
    pieces = split(capture, {"z.q": torch.zeros(3, 2), "rest.0": torch.ones(3, 2)})
    assert len(pieces) == 3
    assert torch.equal(pieces[0]["rest"][0], torch.ones(1, 2))


def test_split_when_names_are_positional_then_arrays_go_by_order():
    capture = capture_of_call(Two(), torch.zeros(1, 3), torch.zeros(3, 2))
    pieces = split(capture, {"arr_0": torch.zeros(2, 3), "arr_1": torch.zeros(2, 3, 2)})
    assert set(pieces[0]) == {"x", "table"}
    assert len(split(relu(1), {"images": torch.zeros(2, 3)})) == 2


def test_make_batches_when_an_array_is_no_input_then_named_and_left_out():
    arrays = {"input": torch.zeros(2, 3), "labels": torch.zeros(2)}
    made = make_batches(Data(label="d", arrays=arrays), relu(1))
    assert made.unused == ("labels",)


@pytest.mark.parametrize(
    ("array", "words", "fix"),
    [
        (torch.zeros(5, 3), "5 samples .* do not divide into batches of 2", "leave out the last 1"),
        (torch.zeros(4, 3, dtype=torch.float64), "dtype float64, .* float32", "astype"),
        (torch.zeros(4, 7), "size 7 in dimension 1, the graph was captured for exactly 3", "Dim"),
        (torch.zeros(4), r"shape \(4,\), one call takes \(2, 3\)", r"(samples, 3)"),
        (torch.zeros(0, 3), "is empty", "at least one sample"),
    ],
)
def test_split_when_an_array_does_not_fit_then_refused(array, words, fix):
    with pytest.raises(InputError, match=words) as caught:
        split(relu(2), {"input": array})
    assert fix in caught.value.fix


def test_split_when_an_array_is_missing_then_named_with_those_there_are():
    capture = capture_of_call(Two(), torch.zeros(1, 3), torch.zeros(3, 2))
    with pytest.raises(InputError, match="no array for input table: it holds x, tabel"):
        split(capture, {"x": torch.zeros(1, 3), "tabel": torch.zeros(1, 3, 2)})


@pytest.mark.parametrize(
    ("is_dynamic", "words"), [(False, "captured with fixed sizes, 2"), (True, "for 1 to 64")]
)
def test_split_when_the_batch_size_does_not_fit_then_refused(is_dynamic, words):
    capture = relu(2, is_dynamic=is_dynamic)
    with pytest.raises(InputError, match=words):
        split(capture, {"input": torch.zeros(200, 3)}, batch_size=100)


def test_make_batches_when_batches_are_ready_then_passed_through():
    data = Data(label="m:f", batches=iter([1, 2, 3]))
    assert list(make_batches(data, relu(1), max_batches=2).batches) == [1, 2]
    with pytest.raises(InputError, match="gives whole batches"):
        make_batches(data, relu(1), batch_size=2)
