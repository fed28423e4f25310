"""Calls of several dynamic sizes in any order: a delegate plans for each call alone."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim

import pt2e_quant as pq
from pt2e_quant.backends.xnnpack.load_program import ForwardCall
from pt2e_quant.core.errors import ArtifactError

SIZES = ((3, 64), (1, 128), (3, 64), (2, 96), (3, 64), (1, 32))
"""Images and pixels of a side: many small ones between few large ones."""


class Pooled(nn.Module):
    """Values for each image beside values for each pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3, 2, 1)
        self.pooled, self.pixels = nn.Conv2d(16, 16, 1), nn.Conv2d(16, 16, 1)
        self.both, self.out = nn.Conv2d(32, 16, 1), nn.Conv2d(16, 4, 3, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv(x))
        pooled = F.relu(self.pooled(F.adaptive_avg_pool2d(x, 1)))
        pooled = F.interpolate(pooled, size=x.shape[-2:], mode="bilinear")
        return self.out(F.relu(self.both(torch.cat([F.relu(self.pixels(x)), pooled], 1))))


class Window(nn.Module):
    """What is new behind what is kept, beside a value for each of both."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, new: Tensor, kept: Tensor, bias: Tensor) -> Tensor:
        return self.linear(torch.cat([kept, new])) + bias


def images(count: int, side: int) -> Tensor:
    generator = torch.Generator().manual_seed(count * side)
    return torch.randn(count, 3, side, side, generator=generator)


@pytest.fixture(scope="module")
def artifact():
    torch.manual_seed(0)
    sides = {2: 32 * Dim("h", min=1, max=6), 3: 32 * Dim("w", min=1, max=6)}
    example = images(2, 64)
    return pq.quantize(
        Pooled().eval(),
        (example,),
        dynamic_shapes={"x": {0: Dim("images", min=1, max=8), **sides}},
        calibration_data=[example],
        backend="xnnpack",
        verify=False,
        progress=False,
    )


def test_call_when_sizes_grew_and_shrank_before_then_equals_that_of_a_new_process(artifact):
    wanted = {}
    for size in SIZES:
        artifact.reset()
        wanted[size] = artifact.run(images(*size))
    artifact.reset()
    for size in SIZES:
        found = artifact.run(images(*size))
        assert torch.equal(found, wanted[size]), size


def test_plan_when_calls_grow_or_shrink_as_a_whole_then_no_other_call_is_made(artifact):
    call = ForwardCall(artifact.pte)
    made = []
    execute = call._execute
    call._execute = lambda inputs: made.append(tuple(inputs[0].shape[:3:2])) or execute(inputs)
    for size in ((2, 32), (2, 64), (1, 32), (4, 64), (1, 64), (5, 32), (5, 64)):
        call.run([images(*size)])
    assert made == [(2, 32), (2, 64), (1, 32), (4, 64), (1, 64), (5, 64), (5, 32), (5, 64)]


def test_plan_when_calls_write_buffers_then_the_error_tells_both_sizes(artifact):
    call = ForwardCall(artifact.pte, keeps_state=True)
    call.run([images(3, 32)])
    with pytest.raises(ArtifactError, match=r"\(3, 3, 32, 32\).* call of \(3, 3, 64, 64\)"):
        call.run([images(1, 64)])
    call.run([images(3, 64)])
    call.run([images(1, 64)])


def test_plan_when_the_largest_sizes_do_not_fit_together_then_loaded_anew():
    torch.manual_seed(0)
    model = Window().eval()

    def call(new: int, kept: int) -> tuple[Tensor, ...]:
        return torch.randn(new, 8), torch.randn(kept, 8), torch.randn(new + kept, 8)

    artifact = pq.quantize(
        model,
        call(3, 4),
        dynamic_shapes=({0: Dim.AUTO}, {0: Dim.AUTO}, {0: Dim.AUTO}),
        max_sizes={"new": {0: 16}, "kept": {0: 16}},
        calibration_data=[call(5, 5) for _ in range(4)],
        backend="xnnpack",
        progress=False,
    )
    for new, kept in ((5, 2), (2, 5), (1, 6), (7, 1), (5, 2)):
        x = [value.clamp(-2, 2) for value in call(new, kept)]
        assert pq.sqnr_db(model(*x), artifact.run(*x)) > 25
