"""Slices of dynamic tensors in the delegate: at every size, in any order of calls."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.export import Dim

import pt2e_quant as pq
from benchmarks.measure import sqnr_db
from tests.backends.call_saved import call_pte


class Sliced(nn.Module):
    """Slices between two layers of sequences or images."""

    def __init__(self, cut, *, images=False):
        super().__init__()
        torch.manual_seed(0)
        self.cut = cut
        self.first = nn.Conv2d(3, 12, 3, padding=1) if images else nn.Linear(12, 12)
        self.last = nn.Conv2d(4, 4, 1) if images else nn.Linear(4, 4)

    def forward(self, x):
        return self.last(self.cut(torch.relu(self.first(x))))


def noise(*sizes, seed=1):
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed))


def lowered(model, x, shapes, recipe):
    other = noise(*x.shape, seed=2)
    return pq.quantize(
        model.eval(),
        (x,),
        dynamic_shapes=shapes,
        calibration_data=[(x,), (other,)],
        backend=pq.backends.get("xnnpack").allowing_slower(),
        recipe=recipe,
        progress=False,
    )


def as_its_graph(artifact, call, result):
    """True if a result is that of the q/dq graph but for rounding."""
    with torch.no_grad():
        expected = artifact.quantized(*call)
    return expected.shape == result.shape and sqnr_db([expected], [result]) > 30


CUTS = {
    "parts": (lambda x: sum(x.chunk(3, -1)), True),
    "from the end": (lambda x: x[..., -4:], True),
    "first rows": (lambda x: x[:, :2, :4], True),
    "rows inside": (lambda x: x[:, 1:3, 8:], True),
    "the last row": (lambda x: x[:, -1:, :4], False),
    "all but the first": (lambda x: x[:, 1:, :4], False),
}


@pytest.mark.parametrize("recipe", ["int8", "int8_dynamic"])
@pytest.mark.parametrize("name", CUTS)
def test_slice_when_other_sizes_are_dynamic_then_in_the_delegate_and_right(name, recipe, tmp_path):
    cut, is_delegated = CUTS[name]
    model, x = Sliced(cut), noise(3, 6, 12)
    shapes = {"x": {0: Dim("batch", min=1, max=8), 1: Dim("length", min=4, max=16)}}
    artifact = lowered(model, x, shapes, recipe)
    kernels = artifact.contents().kernels
    assert ("aten.slice_copy" in kernels) != is_delegated
    calls = [(noise(*sizes, 12, seed=sum(sizes)),) for sizes in [(3, 6), (1, 4), (8, 16), (2, 9)]]
    for results in (call_pte(artifact, calls, tmp_path), [artifact.run(*call) for call in calls]):
        for call, result in zip(calls, results, strict=True):
            assert as_its_graph(artifact, call, result)


@pytest.mark.parametrize("name", ["channels", "rows"])
def test_slice_of_images_when_the_batch_is_dynamic_then_in_the_delegate_and_right(name):
    cut = {
        "channels": lambda x: x[:, 4:8] + x[:, -4:],
        "rows": lambda x: x[:, :4, 1:6, 2:],
    }[name]
    model, x = Sliced(cut, images=True), noise(2, 3, 8, 9)
    artifact = lowered(model, x, {"x": {0: Dim("batch", min=1, max=8)}}, "int8")
    assert "aten.slice_copy" not in artifact.contents().kernels
    for batch in (2, 8, 1, 5):
        call = noise(batch, 3, 8, 9, seed=batch)
        assert as_its_graph(artifact, (call,), artifact.run(call))


@given(data=st.data())
@settings(deadline=None, max_examples=8)
def test_slice_when_drawn_then_as_in_float_at_each_size(data):
    rank = data.draw(st.integers(2, 4))
    dim = data.draw(st.integers(1, rank - 1))
    size = data.draw(st.integers(1, 5))
    start = data.draw(st.integers(-size, size - 1))
    end = data.draw(st.sampled_from([None, *range(start % size + 1, size + 1)]))
    sizes = [2, *(size if d == dim else data.draw(st.integers(1, 4)) for d in range(1, rank))]

    class Slice(nn.Module):
        def forward(self, x):
            at = (slice(None),) * dim + (slice(start, end),)
            part = (x + x)[at]
            return part + part

    x = noise(*sizes)
    artifact = lowered(Slice(), x, {"x": {0: Dim("batch", min=1, max=6)}}, "int8")
    for batch in (1, 6, 3):
        call = noise(batch, *sizes[1:], seed=batch)
        assert as_its_graph(artifact, (call,), artifact.run(call))
