"""Calls that do not fit are refused before the runtime sees them; the next right call is right."""

import pytest
import torch

from pt2e_quant.core.errors import InputError
from tests.faults.conftest import call, equal

IMAGE, ROW = call()
BAD = {
    "another dtype": ((IMAGE.double(), ROW), {}),
    "half precision": ((IMAGE, ROW.half()), {}),
    "integers": ((IMAGE, ROW.long()), {}),
    "swapped": ((ROW, IMAGE), {}),
    "no batch dimension": ((IMAGE[0], ROW), {}),
    "a dimension too many": ((IMAGE[None], ROW), {}),
    "another width": ((IMAGE[..., :5], ROW), {}),
    "another number of channels": ((IMAGE[:, :2], ROW), {}),
    "unequal batches": ((IMAGE, ROW[:1]), {}),
    "an empty batch": ((IMAGE[:0], ROW[:0]), {}),
    "a batch above the largest": ((*call(9),), {}),
    "too few": ((IMAGE,), {}),
    "too many": ((IMAGE, ROW, ROW), {}),
    "an unknown name": ((IMAGE,), {"rows": ROW}),
    "given twice": ((IMAGE, ROW), {"row": ROW}),
    "a list": (([IMAGE], ROW), {}),
    "an array": ((IMAGE, ROW.numpy()), {}),
    "nothing": ((IMAGE, None), {}),
    "a tensor without data": ((IMAGE, ROW.to("meta")), {}),
    "a sparse tensor": ((IMAGE, ROW.to_sparse()), {}),
}


@pytest.mark.parametrize("name", BAD)
def test_artifact_when_a_call_does_not_fit_then_an_error_and_the_next_call_right(artifact, name):
    before = artifact.run(*call())
    args, kwargs = BAD[name]
    with pytest.raises(InputError):
        artifact.run(*args, **kwargs)
    assert equal(artifact.run(*call()), before)


@pytest.mark.parametrize(
    "changed",
    [
        lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
        lambda x: torch.cat([x, x], -1)[..., : x.shape[-1]],
        lambda x: x.clone().requires_grad_(),
        lambda x: torch.nn.Parameter(x),
        lambda x: torch.cat([torch.zeros(1), x.flatten()])[1:].view(x.shape),
    ],
)
def test_artifact_when_inputs_lie_otherwise_in_memory_then_the_same_result(artifact, changed):
    assert equal(artifact.run(*map(changed, call())), artifact.run(*call()))


def test_artifact_when_called_in_any_order_of_sizes_then_each_result_as_alone(artifact):
    alone = {batch: artifact.run(*call(batch)) for batch in (1, 2, 5, 8)}
    kept = [artifact.run(*call(batch)) for batch in (8, 1, 5, 2, 8, 8, 1, 2)]
    for batch, found in zip((8, 1, 5, 2, 8, 8, 1, 2), kept, strict=True):
        assert equal(found, alone[batch])


def test_artifact_when_a_result_is_written_then_the_next_call_is_right(artifact):
    before = artifact.run(*call())
    copies = {name: value.clone() for name, value in before.items()}
    before["logits"].fill_(7.0)
    assert equal(artifact.run(*call()), copies)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3e38])
def test_artifact_when_data_is_not_finite_then_other_calls_are_right(artifact, value):
    before = artifact.run(*call())
    image, row = call()
    image[0, 0, 0, 0] = value
    artifact.run(image, row)
    assert equal(artifact.run(*call()), before)
