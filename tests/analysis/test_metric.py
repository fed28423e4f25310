"""Measures of outputs over batches, and what of a batch they are given."""

import numpy as np
import pytest
import torch

from pt2e_quant.analysis.metric import MetricSum, batches_of, picker, split_batch
from pt2e_quant.core.errors import ConfigError, InputError


class Accuracy:
    """As torchmetrics has it."""

    def __init__(self):
        self.right = self.all = 0

    def update(self, outputs, targets):
        self.right += int((outputs.argmax(-1) == targets).sum())
        self.all += len(targets)

    def compute(self):
        return torch.tensor(self.right / self.all)

    def reset(self):
        self.right = self.all = 0


def share_right(outputs, targets):
    return (outputs.argmax(-1) == targets).float().mean()


@pytest.mark.parametrize("metric", [share_right, Accuracy()])
def test_metric_sum_when_batches_differ_in_size_then_samples_count_alike(metric):
    sums = MetricSum(metric)
    sums.add(torch.eye(3), torch.tensor([0, 1, 2]))
    sums.add(torch.eye(3)[:1], torch.tensor([2]))
    assert sums.value() == 0.75


def test_metric_sum_when_an_object_is_given_then_it_is_not_changed():
    metric = Accuracy()
    MetricSum(metric).add(torch.eye(3), torch.tensor([0, 1, 2]))
    assert metric.all == 0


def test_metric_sum_when_a_metric_of_torchmetrics_is_given_then_as_it_computes():
    torchmetrics = pytest.importorskip("torchmetrics")
    metric = torchmetrics.classification.MulticlassAccuracy(num_classes=3, average="micro")
    sums = MetricSum(metric)
    sums.add(torch.eye(3), torch.tensor([0, 1, 2]))
    sums.add(torch.eye(3)[:1], torch.tensor([2]))
    assert sums.value() == 0.75
    assert not metric.update_called


def test_metric_sum_when_a_function_takes_no_targets_then_the_error_shows_its_parameters():
    def accuracy(outputs):
        return outputs.sum()

    message = r"found accuracy\(outputs\)(?s:.)*may ignore the targets"
    with pytest.raises(ConfigError, match=message):
        MetricSum(accuracy)
    MetricSum(lambda outputs, targets=None: 1.0)
    MetricSum(max)  # without a signature


def test_metric_sum_when_the_metric_gives_no_number_then_the_error_says_so():
    with pytest.raises(ConfigError, match="one number"):
        MetricSum(lambda outputs, targets: outputs).add(torch.eye(3), None)
    with pytest.raises(ConfigError, match="function of outputs"):
        MetricSum(3)


def test_split_batch_when_nothing_is_said_then_labels_are_the_targets():
    x, y = torch.ones(2), torch.zeros(2)
    assert split_batch((x, y), None, None) == ((x,), y)
    taken, wanted = split_batch({"ids": x, "labels": y}, None, None)
    assert set(taken) == {"ids"}
    assert wanted is y
    assert split_batch(x, None, None) == (x, None)
    assert split_batch((x, y), [0, 1], None) == ((x, y), None)


@pytest.mark.parametrize("inputs", [-2, [0], (0,), lambda batch: batch[0]])
def test_split_batch_when_inputs_pick_the_first_of_a_pair_then_the_second_is_the_target(inputs):
    _, target = split_batch((torch.ones(2), torch.zeros(2)), inputs, None)
    assert torch.equal(target, torch.zeros(2))


def test_split_batch_when_inputs_pick_the_second_of_a_pair_then_there_is_no_target():
    assert split_batch((torch.ones(2), torch.zeros(2)), 1, None)[1] is None


@pytest.mark.parametrize("targets", ["labls", ["labls"]])
def test_split_batch_when_there_are_no_such_targets_then_the_error_names_the_argument(targets):
    with pytest.raises(InputError, match=r"targets='labls' is not .*did you mean"):
        split_batch({"x": torch.ones(2), "labels": torch.ones(2)}, "x", targets)


@pytest.mark.parametrize("given", [torch.ones(3), {"x": 1}, None, np.ones(3)])
def test_batches_of_when_given_no_batches_then_the_error_shows_the_call(given):
    with pytest.raises(InputError, match=r"tune\(\[batch\]\)"):
        batches_of(given, "tune({})")


@pytest.mark.parametrize("targets", [2, -1])
def test_split_batch_when_targets_are_an_index_then_the_others_are_the_inputs(targets):
    x, y, z = torch.ones(2), torch.zeros(2), torch.ones(1)
    assert split_batch((x, y, z), None, targets) == ((x, y), z)


def test_split_batch_when_parts_are_named_then_these_are_given():
    batch = {"image": np.ones((2, 3), np.float32), "species": [[1], [2]], "id": ["a", "b"]}
    taken, wanted = split_batch(batch, "image", "species")
    assert torch.equal(taken[0], torch.ones(2, 3))
    assert torch.equal(wanted, torch.tensor([[1], [2]])) if torch.is_tensor(wanted) else wanted
    assert split_batch(batch, "image", lambda b: b["id"])[1] == ["a", "b"]


@pytest.mark.parametrize("wanted", [[torch.ones(1), torch.zeros(1)], {"boxes": torch.ones(1)}])
def test_split_batch_when_targets_are_several_then_all_are_given(wanted):
    x, y = torch.ones(2), torch.zeros(2)
    assert split_batch(((x, y), wanted), None, None) == ((x, y), wanted)
    assert split_batch(({"a": x}, wanted), None, 1) == ({"a": x}, wanted)


def test_picker_when_nothing_takes_targets_then_all_of_a_batch_is_the_models():
    x, y = torch.ones(2), torch.zeros(2)
    assert picker(None, None, None)((x, y)) == ((x, y), None)
    assert picker(None, 0, None)((x, y)) == ((x,), None)
    assert picker(None, None, 1)((x, y)) == ((x,), y)
    assert picker(share_right, None, None)((x, y)) == ((x,), y)


def test_batches_of_when_an_iterator_is_given_then_it_can_be_read_twice():
    held = batches_of(iter([1, 2]), "f({})")
    assert [*held, *held] == [1, 2, 1, 2]
    given = [3]
    assert batches_of(given, "f({})") is given


def test_picker_when_calibration_data_has_no_targets_then_its_inputs_are_found():
    x, y = torch.zeros(2, 3), torch.ones(2)
    for pick in (picker(share_right, 0, 1), picker(share_right, None, 1)):
        assert pick.inputs_of((x, y))[0] is x
        assert pick.inputs_of((x,))[0] is x
    assert picker(share_right, 0, 1).inputs_of(x)[0] is x  # not its first row
    assert picker(share_right, None, "labels").inputs_of({"x": x}) == {"x": x}


def test_metric_sum_when_a_class_is_given_then_the_error_shows_the_call():
    with pytest.raises(ConfigError, match=r"found the class Accuracy(?s:.)*metric=Accuracy\(…\)"):
        MetricSum(Accuracy)


def test_metric_sum_when_an_object_fails_without_targets_then_says_how_to_give_them():
    with pytest.raises(ConfigError, match="targets="):
        MetricSum(Accuracy()).add(torch.eye(3), None)


@pytest.mark.parametrize("metric", [share_right, Accuracy()])
def test_metric_sum_when_it_takes_one_of_several_outputs_then_the_error_says_so(metric):
    with pytest.raises(ConfigError, match=r"outputs that are a tuple(?s:.)*outputs\[0\]"):
        MetricSum(metric).add((torch.eye(3), torch.eye(3)), torch.arange(3))


def test_metric_when_it_fails_without_targets_then_says_how_to_give_them():
    total = MetricSum(share_right)
    with pytest.raises(ConfigError, match=r"batch without targets.*\n.*targets="):
        total.add(torch.zeros(2, 3), None)
