"""What a model takes is picked out of a loader's batches; a refused label names the argument."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.export import export
from torch.utils.data import DataLoader, TensorDataset

import pt2e_quant as pq
from pt2e_quant.core.errors import ConfigError, InputError
from pt2e_quant.core.read_capture import capture_of, rebuild_capture
from pt2e_quant.flow.calibrate.calibrate import calibrate
from pt2e_quant.flow.calibrate.pick_inputs import bind_batch, pick_inputs, pick_part
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


def test_batch_when_its_size_is_wrong_then_the_error_shows_no_certain_pick(prepared):
    with pytest.raises(InputError, match="inputs= takes a key") as error:
        calibrate(prepared, [(torch.ones(5, 4), torch.zeros(5))], progress=False)
    assert "inputs=0" not in str(error.value)


def test_dict_when_the_only_input_has_another_name_then_the_error_shows_the_key(prepared):
    batch = {"pixels": torch.ones(4, 4), "label": torch.zeros(4)}
    with pytest.raises(InputError, match=r"calibrate\(…, inputs='pixels'\)"):
        calibrate(prepared, [batch], progress=False)


def test_dict_when_inputs_have_other_names_then_the_error_shows_a_function(prepared_pair):
    batch = {"ids": torch.ones(4, 4), "attention": torch.ones(4, 4)}
    with pytest.raises(InputError) as error:
        calibrate(prepared_pair, [batch], progress=False)
    assert 'inputs=lambda batch: {"ids": batch["ids"], "mask": batch["…"]}' in str(error.value)


def test_pick_when_it_does_not_fit_then_the_error_says_that_it_was_picked(prepared):
    with pytest.raises(InputError, match=r"what inputs=1 picks does not fit: .*dtype int64"):
        calibrate(prepared, [(torch.ones(4, 4), torch.zeros(4).long())], inputs=1, progress=False)


@pytest.mark.parametrize("inputs", [1.5, [], [None]])
def test_pick_when_inputs_is_no_pick_then_refused(inputs):
    with pytest.raises(ConfigError, match="inputs= takes a key"):
        pick_inputs((1, 2), inputs)


@pytest.mark.parametrize(
    ("inputs", "says"),
    [
        (lambda batch: batch["image"], "a tuple of 2 parts: TypeError"),
        (lambda batch: None, "returned None"),
    ],
)
def test_pick_when_the_function_fails_then_the_error_names_the_argument(inputs, says):
    with pytest.raises(InputError, match=rf"inputs= .*{says}"):
        pick_inputs((1, 2), inputs)


@pytest.mark.parametrize("as_given", [torch.Tensor.clone, torch.Tensor.numpy])
def test_batch_when_samples_are_in_a_list_then_they_are_stacked(prepared, as_given):
    rows = torch.randn(4, 4)
    batch = {"pixels": [as_given(row) for row in rows], "label": [0, 1, 2, 3]}
    (leaf,) = bind_batch(capture_of(prepared), batch, "pixels")
    assert torch.equal(leaf, rows)


def test_batch_when_the_model_takes_a_list_then_it_is_not_stacked():
    class Lists(nn.Module):
        def forward(self, parts):
            return parts[0] + parts[1]

    parts = [torch.ones(4, 4), torch.zeros(4, 4)]
    capture = rebuild_capture(export(Lists(), (parts,)).module())
    first, second = bind_batch(capture, {"parts": parts, "label": 1}, ["parts"])
    assert first is parts[0]
    assert second is parts[1]


def test_pick_part_when_labels_are_in_a_list_then_one_tensor():
    for labels in ([torch.tensor(3), torch.tensor(4)], [np.int64(3), np.int64(4)]):
        assert torch.equal(pick_part({"label": labels}, "label"), torch.tensor([3, 4]))


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


class _OneDict(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, parts: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.linear(parts["ids"]) * parts["mask"]


@pytest.mark.parametrize(
    ("labelled", "inputs"), [(True, 0), (True, lambda batch: batch[0]), (False, None)]
)
def test_batch_when_the_only_input_is_a_dict_then_it_is_taken_as_one(
    plain_backend, labelled, inputs
):
    parts = {"ids": torch.randn(4, 4), "mask": torch.ones(4, 4)}
    batch = (parts, torch.arange(4)) if labelled else parts
    model = _OneDict().eval()
    prepared = prepare_pt2e(export(model, (parts,)), plain_backend.quantizer())
    calibrate(prepared, [batch], inputs=inputs, progress=False)
    assert torch.equal(prepared.meta["pt2e_quant.sample"].leaves[0], parts["ids"])
    with pytest.raises(InputError, match=r"unknown input \['other'\]: expected \(parts\)"):
        calibrate(prepared, [{"other": parts["ids"]}], progress=False)
    for form in (model, prepared, plain_backend.lower(pq.convert(prepared), verify=False)):
        found = pq.evaluate(form, [batch], lambda out, _: out.sum(), inputs=inputs, progress=False)
        assert found == pytest.approx(float(model(parts).detach().sum()), rel=0.05)
