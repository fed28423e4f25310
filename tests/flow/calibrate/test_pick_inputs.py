"""What a model takes is picked out of a loader's batches; a refused label names the argument."""

import pytest
import torch
from torch import nn
from torch.export import export
from torch.utils.data import DataLoader, TensorDataset

import pt2e_quant as pq
from pt2e_quant.core.errors import InputError
from pt2e_quant.core.read_capture import capture_of
from pt2e_quant.flow.calibrate.calibrate import calibrate
from pt2e_quant.flow.calibrate.pick_inputs import bind_batch, pick_inputs
from pt2e_quant.flow.prepare.prepare_pt2e import prepare_pt2e


class _TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.linear(ids) * mask


@pytest.fixture
def loader():
    torch.manual_seed(0)
    return DataLoader(TensorDataset(torch.randn(12, 4), torch.arange(12)), batch_size=4)


@pytest.fixture
def prepared(plain_backend):
    program = export(nn.Sequential(nn.Linear(4, 4)).eval(), (torch.zeros(4, 4),))
    return prepare_pt2e(program, plain_backend.quantizer())


@pytest.fixture
def prepared_pair(plain_backend):
    program = export(_TwoInputs().eval(), (torch.zeros(4, 4), torch.ones(4, 4)))
    return prepare_pt2e(program, plain_backend.quantizer())


@pytest.mark.parametrize("inputs", [0, [0], lambda batch: batch[0], lambda batch: (batch[0],)])
def test_loader_with_labels_when_inputs_picks_the_image_then_calibrates(prepared, loader, inputs):
    calibrate(prepared, loader, inputs=inputs, progress=False)
    sample = prepared.meta["pt2e_quant.sample"]
    assert torch.equal(sample.leaves[0], loader.dataset.tensors[0][:4])


def test_loader_with_labels_when_nothing_is_picked_then_the_error_shows_inputs(prepared, loader):
    with pytest.raises(InputError) as error:
        calibrate(prepared, loader, progress=False)
    assert "calibrate(…, inputs=0)" in str(error.value)


def test_dict_with_labels_when_nothing_is_picked_then_the_error_shows_the_keys(prepared_pair):
    batch = {"ids": torch.ones(4, 4), "mask": torch.ones(4, 4), "labels": torch.zeros(4)}
    with pytest.raises(InputError) as error:
        calibrate(prepared_pair, [batch], progress=False)
    assert "inputs=['ids', 'mask']" in str(error.value)
    calibrate(prepared_pair, [batch], inputs=["ids", "mask"], progress=False)


def test_tuple_with_labels_when_two_are_inputs_then_the_error_shows_both(prepared_pair):
    batch = torch.ones(4, 4), torch.ones(4, 4), torch.zeros(4)
    with pytest.raises(InputError) as error:
        calibrate(prepared_pair, [batch], progress=False)
    assert "inputs=[0, 1]" in str(error.value)


def test_batch_when_its_size_is_wrong_then_the_error_shows_no_pick(prepared):
    with pytest.raises(InputError) as error:
        calibrate(prepared, [(torch.ones(5, 4), torch.zeros(5))], progress=False)
    assert "inputs=" not in str(error.value)


@pytest.mark.parametrize(
    ("batch", "inputs", "says"),
    [
        ({"image": 1, "label": 2}, "imge", 'did you mean "image"'),
        ((1, 2), 2, "a tuple of 2 parts"),
        (torch.ones(()), 1, "a Tensor"),
    ],
)
def test_part_when_absent_then_refused_with_what_there_is(batch, inputs, says):
    with pytest.raises(InputError, match=says):
        pick_inputs(batch, inputs)


def test_quantize_when_data_has_labels_then_inputs_picks(plain_backend, loader):
    artifact = pq.quantize(
        nn.Sequential(nn.Linear(4, 4)),
        args=(torch.zeros(4, 4),),
        calibration_data=loader,
        inputs=0,
        backend="plain",
        progress=False,
    )
    assert artifact.run(torch.ones(4, 4)).shape == (4, 4)


def test_pick_when_the_batch_is_a_tensor_then_it_is_its_only_part():
    x = torch.zeros(2, 3)
    assert pick_inputs(x, 0)[0] is x
    with pytest.raises(InputError, match="inputs=1 is not in the batch, which is a Tensor"):
        pick_inputs(x, 1)


def test_bind_when_the_batch_has_labels_then_the_error_names_the_argument(prepared):
    capture = capture_of(prepared)
    with pytest.raises(InputError, match=r"profile\(…, inputs=0\)"):
        bind_batch(capture, (torch.ones(4, 4), torch.zeros(4)), call="profile")
    assert len(bind_batch(capture, (torch.ones(4, 4), torch.zeros(4)), 0)) == 1


@pytest.mark.parametrize(
    "collate", [tuple, list, lambda parts: {"ids": parts[0], "mask": parts[1]}]
)
@pytest.mark.parametrize("inputs", [0, [0]])
def test_pick_when_the_first_part_holds_several_inputs_then_these(prepared_pair, collate, inputs):
    ids, mask = torch.randn(4, 4), torch.ones(4, 4)
    batch = (collate([ids, mask]), torch.arange(4))
    calibrate(prepared_pair, [batch], inputs=inputs, progress=False)
    sample = prepared_pair.meta["pt2e_quant.sample"]
    assert [torch.equal(a, b) for a, b in zip(sample.leaves, (ids, mask), strict=True)] == [
        True
    ] * 2


def test_pick_when_a_part_is_a_list_of_numbers_then_one_tensor():
    (found,) = pick_inputs(([[1, 2], [3, 4]], "label"), 0)
    assert torch.equal(found, torch.tensor([[1, 2], [3, 4]]))
