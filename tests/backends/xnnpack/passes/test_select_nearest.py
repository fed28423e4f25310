import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.export import Dim

from pt2e_quant.backends.xnnpack.backend import BACKEND
from pt2e_quant.backends.xnnpack.passes.select_nearest import select_nearest
from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.ops import RESIZE_NEAREST, is_call
from tests.backends.call_saved import Saved, call_saved
from tests.backends.xnnpack.passes.test_data_movement import rounded

aten = torch.ops.aten


class Resized(nn.Module):
    """A resize between a dequantize and a quantize of equal qparams, or in float."""

    def __init__(self, resize, *, is_quantized=True):
        super().__init__()
        self.resize = resize
        self.round = (lambda x: rounded(x, 0.02, 3)) if is_quantized else (lambda x: x * 2.0)

    def forward(self, x):
        return self.round(self.resize(self.round(x)))


def exported(model, x, shapes=None):
    gm = torch.export.export(model, (x,), dynamic_shapes=shapes).module()
    Editor(gm).erase_dead([n for n in gm.graph.nodes if n.op == "call_module"])
    return gm


def noise(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


SIZES = st.integers(1, 7)
SCALES = st.sampled_from((1.0, 2.0, 3.0, 0.5, 1.5, 2.3, 0.7))


@settings(max_examples=40, deadline=None)
@given(
    before=st.lists(SIZES, min_size=1, max_size=3),
    after=st.lists(st.integers(1, 60), min_size=3, max_size=3),
    scales=st.none() | st.lists(SCALES, min_size=3, max_size=3),
    mode=st.sampled_from(("nearest", "nearest-exact")),
    is_quantized=st.booleans(),
)
def test_nearest_when_of_known_sizes_then_selected_with_equal_values(
    before, after, scales, mode, is_quantized
):
    rank = len(before)
    given_ = {"size": after[:rank]} if scales is None else {"scale_factor": scales[:rank]}
    if scales is not None and any(int(n * s) < 1 for n, s in zip(before, scales, strict=False)):
        return  # nothing would be left
    model = Resized(lambda x: F.interpolate(x, **given_, mode=mode), is_quantized=is_quantized)
    x = noise(2, 3, *before)
    gm = exported(model, x)
    assert select_nearest(gm).changed
    assert not any(is_call(n, RESIZE_NEAREST) for n in gm.graph.nodes)
    assert torch.equal(gm(x), model(x))
    assert not select_nearest(gm).changed


# 41 and 49 times the nearest float32 to their inverses are below 1: torch takes other places there.
OPERATORS = {
    "default": lambda x: aten.upsample_nearest2d.default(x, [9, 10], 2.25, 2.5),
    "exact default": lambda x: aten._upsample_nearest_exact2d.default(x, [9, 10]),
    "1d default": lambda x: aten.upsample_nearest1d.default(x.flatten(1, 2), [13], 3.1),
    "3d default": lambda x: aten.upsample_nearest3d.default(x[:, None], [9, 4, 8], 3.0, None, 2.0),
    "41 times": lambda x: F.interpolate(x, size=(4 * 41, 4 * 49)),
    "49 times by a scale": lambda x: F.interpolate(x, scale_factor=(49.0, 41.0)),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_nearest_when_in_another_form_then_selected_with_equal_values(name):
    model, x = Resized(OPERATORS[name]), noise(2, 3, 4, 4)
    gm = exported(model, x)
    assert select_nearest(gm).changed
    assert torch.equal(gm(x), model(x))


FORMS = {
    "twice": lambda x: F.interpolate(x, scale_factor=2.0),
    "exact": lambda x: F.interpolate(x, size=(9, 7), mode="nearest-exact"),
    "other sizes": lambda x: F.interpolate(x, size=(9, 13)),
    "of rows": lambda x: F.interpolate(x.flatten(1, 2), scale_factor=3.0),
    "of volumes": lambda x: F.interpolate(x[:, None], scale_factor=(1, 2, 3)),
}


@pytest.mark.slow  # long: others of its file run in CI
def test_nearest_when_batches_are_dynamic_then_a_new_process_gives_equal_values(tmp_path):
    files, expected = [], []
    for name, form in FORMS.items():
        model = Resized(form)
        gm = exported(model, noise(2, 3, 4, 6), {"x": {0: Dim("batch", min=1, max=8)}})
        artifact = BACKEND.lower(gm, (noise(2, 3, 4, 6),))
        assert not artifact.report.float_regions, name
        assert not any("nearest" in name for name in artifact.report.float_ops), name
        path = tmp_path / f"{name}.pte"
        artifact.save(path)
        calls = [(noise(rows, 3, 4, 6),) for rows in (1, 8, 3, 8)]
        files.append(Saved("xnnpack", path, calls))
        expected.append([model(*call) for call in calls])
    for _ in range(2):
        for results, wanted in zip(call_saved(files, tmp_path), expected, strict=True):
            assert all(torch.equal(r, w) for r, w in zip(results, wanted, strict=True))


def test_nearest_when_its_height_is_dynamic_then_left_with_equal_values():
    model, x = Resized(FORMS["twice"]), noise(2, 3, 4, 6)
    gm = exported(model, x, {"x": {2: Dim("height", min=2, max=16)}})
    result = select_nearest(gm)
    assert not result.changed
    assert [n.text for n in result.notes] == ["its height or width is known only at run time"]
    artifact = BACKEND.lower(gm, (x,))
    for height in (2, 16, 4):
        rows = noise(2, 3, height, 6)
        assert torch.equal(artifact.run(rows), model(rows))
