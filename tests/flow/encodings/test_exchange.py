"""Qparams to JSON and back: the program that they came from, in every format."""

import json
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import pt2e_quant as pq
from pt2e_quant.core.errors import ArtifactError, ConfigError, UnsupportedError
from pt2e_quant.core.formats.scale_format import ScaleFormat
from pt2e_quant.core.provenance import provenance_of
from pt2e_quant.core.schemes import INT8_WEIGHT
from pt2e_quant.flow.encodings.aimet import read_dicts, read_lists, write_dicts, write_lists
from pt2e_quant.flow.encodings.encoding import Encoding
from pt2e_quant.flow.encodings.own import read_own, write_own
from pt2e_quant.flow.prepare.prepared import observers_of
from pt2e_quant.graph.show import show

FORMATS = ["pt2e_quant", "aimet-1.0.0", "aimet-0.6.1"]


@pytest.fixture
def make(net, quantizer, images):
    def prepared(**weight):
        made = quantizer()
        made.set_global(replace(made.scheme, name="own", weight=replace(INT8_WEIGHT, **weight)))
        return pq.prepare_pt2e(torch.export.export(net, (images[0],)), made)

    return prepared


def calibrated(gm, images):
    return pq.convert_pt2e(pq.calibrate(gm, images, progress=False))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("quant_max", [127, 7])
def test_import_when_exported_then_the_same_program_without_data(
    format, quant_max, make, images, tmp_path
):
    weight = {"quant_min": -quant_max, "quant_max": quant_max}
    original = calibrated(make(**weight), images)
    assert pq.export_encodings(original, tmp_path / "e.json", format=format) == ()
    prepared = make(**weight)
    names = pq.import_encodings(prepared, tmp_path / "e.json")
    assert {"x", "stem.weight", "head.weight"} <= set(names)
    again = pq.convert_pt2e(prepared)  # no data was run through it
    assert show(again) == show(original)
    for name, value in original.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name
    assert torch.equal(again(images[0])["logits"], original(images[0])["logits"])


def test_import_when_data_runs_through_then_nothing_changes_and_the_rest_is_observed(
    make, images, tmp_path
):
    original = calibrated(make(), images)
    pq.export_encodings(original, tmp_path / "e.json")
    data = json.loads((tmp_path / "e.json").read_text())
    data["tensors"] = [t for t in data["tensors"] if t["name"] == "x"]
    (tmp_path / "e.json").write_text(json.dumps(data))
    prepared = make()
    assert pq.import_encodings(prepared, tmp_path / "e.json") == ("x",)
    gm = calibrated(prepared, [100 * x for x in images])
    table = provenance_of(gm)
    assert table.tensor("x").scale == provenance_of(original).tensor("x").scale
    assert table.tensor("linear").scale != provenance_of(original).tensor("linear").scale
    assert table.tensor("x").observer.startswith("ImportedQParams")


def test_import_when_saved_and_loaded_then_still_fixed(make, images, tmp_path):
    original = calibrated(make(), images)
    pq.export_encodings(original, tmp_path / "e.json")
    prepared = make()
    pq.import_encodings(prepared, tmp_path / "e.json")
    pq.save(prepared, tmp_path / "p.ptq")
    again = pq.convert_pt2e(pq.load(tmp_path / "p.ptq"))
    assert torch.equal(again(images[0])["logits"], original(images[0])["logits"])


def rewritten(path, change):
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def edit(target, /, **fields):
    def change(data):
        for row in data["tensors"]:
            if row["name"] == target:
                row.update(fields)

    return change


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("x", {"name": "xx"}, r'"xx" that is not observed here: did you mean "x"'),
        ("head.weight", {"name": "head.wieght"}, r'did you mean "head.weight"'),
        ("x", {"bits": 4, "zero_point": [3]}, r"has 4 bits in the file, and 8 here"),
        ("x", {"scale": [0.1] * 2, "zero_point": [0] * 2}, r"2 scales in the file, and 1 here"),
        ("head.weight", {"scale": [0.1], "zero_point": [128]}, r"1 scales .* and 10 here"),
        ("head.weight", {"is_symmetric": False}, r"affine in the file, and symmetric here"),
        ("head.weight", {"group_size": 8}, r"groups of 8 in the file, of None here"),
        ("x", {"scale": [-1.0]}, r"no positive number"),
        ("x", {"zero_point": [256]}, r"outside of the 256 integers"),
        ("x", {"zero_point": []}, r"1 scales and 0 offsets"),
        ("x", {"steps": ["channels scaled"]}, r"algorithm changed: channels scaled"),
        ("x", {"scale": None}, r"is no file of encodings"),
    ],
)
def test_import_when_an_entry_does_not_fit_then_named_and_nothing_is_changed(
    name, fields, message, make, images, tmp_path
):
    path = tmp_path / "e.json"
    pq.export_encodings(calibrated(make(), images), path)
    rewritten(path, edit(name, **fields))
    prepared = make()
    before = [observer for _, observer in observers_of(prepared)]
    with pytest.raises(ArtifactError, match=message):
        pq.import_encodings(prepared, path)
    assert before == [observer for _, observer in observers_of(prepared)]


def test_import_when_names_differ_then_by_the_users_table(make, images, tmp_path):
    path = tmp_path / "e.json"
    pq.export_encodings(calibrated(make(), images), path, format="aimet-1.0.0")

    def change(data):
        for row in data["activation_encodings"]:
            row["name"] = f"/onnx/{row['name']}"

    rewritten(path, change)
    prepared = make()
    with pytest.raises(ArtifactError, match="not observed here"):
        pq.import_encodings(prepared, path)
    observed = {o["name"] for o in json.loads(path.read_text())["activation_encodings"]}
    names = {name: name.removeprefix("/onnx/") for name in observed}
    assert "x" in pq.import_encodings(prepared, path, names=names)


def test_import_when_two_that_share_disagree_then_refused(quantizer, tmp_path):
    class Cat(nn.Module):
        def forward(self, x, y):
            return {"y": torch.cat([x + y, x])}

    x, y = torch.ones(2, 3), torch.ones(2, 3)
    program = torch.export.export(Cat(), (x, y))
    gm = pq.prepare_pt2e(program, quantizer())
    gm(x, y)
    path = tmp_path / "e.json"
    pq.export_encodings(pq.convert_pt2e(gm), path)
    rewritten(path, edit("cat", scale=[0.5]))
    prepared = pq.prepare_pt2e(torch.export.export(Cat(), (x, y)), quantizer())
    with pytest.raises(ArtifactError, match="share one scale here, but not in the file"):
        pq.import_encodings(prepared, path)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"version": "x"}', "null", '"a"', "{}"])
def test_import_when_no_encodings_then_says_so(text, make, tmp_path):
    path = tmp_path / "e.json"
    path.write_text(text)
    with pytest.raises(ArtifactError, match="is no file of encodings"):
        pq.import_encodings(make(), path)


def test_import_when_newer_or_missing_or_trained_then_says_so(
    make, net, quantizer, images, tmp_path
):
    path = tmp_path / "e.json"
    with pytest.raises(ArtifactError, match="cannot read"):
        pq.import_encodings(make(), path)
    path.write_text('{"version": "2.0.0", "encodings": []}')
    with pytest.raises(ArtifactError, match=r"expected at most 1\.0\.0"):
        pq.import_encodings(make(), path)
    path.write_text('{"format": "pt2e_quant.encodings", "version": 2, "tensors": []}')
    with pytest.raises(ArtifactError, match="expected at most 1"):
        pq.import_encodings(make(), path)
    program = torch.export.export(net.train(), (images[0],))
    with pytest.raises(ConfigError, match="for training"):
        pq.import_encodings(pq.prepare_qat_pt2e(program, quantizer()), path)


def test_export_when_asked_what_it_cannot_then_says_so(make, images, tmp_path):
    gm = calibrated(make(), images)
    with pytest.raises(ConfigError, match=r'did you mean "aimet-1\.0\.0"'):
        pq.export_encodings(gm, tmp_path / "e.json", format="aimet-1.0")
    with pytest.raises(ArtifactError, match="cannot write"):
        pq.export_encodings(gm, tmp_path / "no" / "e.json")
    with pytest.raises(ConfigError, match="no quantized tensor"):
        pq.export_encodings(torch.fx.symbolic_trace(nn.ReLU()), tmp_path / "e.json")


def test_export_when_aimet_then_the_numbers_of_its_specification(make, images, tmp_path):
    gm = calibrated(make(), images)
    x = provenance_of(gm).tensor("x")
    pq.export_encodings(gm, tmp_path / "a.json", format="aimet-1.0.0")
    lists = json.loads((tmp_path / "a.json").read_text())
    row = next(r for r in lists["activation_encodings"] if r["name"] == "x")
    assert row == {
        "name": "x", "enc_type": "PER_TENSOR", "dtype": "INT", "bw": 8, "is_sym": False,
        "scale": x.scale, "offset": [-(x.zero_point[0] + 128)],
    }  # fmt: skip
    weight = next(r for r in lists["param_encodings"] if r["name"] == "head.weight")
    assert (weight["enc_type"], weight["is_sym"], weight["offset"]) == (
        "PER_CHANNEL", True, [-128] * 10,
    )  # fmt: skip
    pq.export_encodings(gm, tmp_path / "b.json", format="aimet-0.6.1")
    (first,) = json.loads((tmp_path / "b.json").read_text())["activation_encodings"]["x"]
    assert first["is_symmetric"] == "False"
    assert first["offset"] == row["offset"][0]
    # Its own relations: min is the real value of 0, and there are 255 steps up to max.
    assert first["min"] == first["offset"] * first["scale"]
    assert first["max"] == pytest.approx(first["min"] + 255 * first["scale"], rel=1e-12)


@settings(max_examples=100)
@given(
    bits=st.integers(2, 16),
    scale=st.lists(st.floats(2.0**-40, 1e6, width=32), min_size=1, max_size=5),
    is_param=st.booleans(),
    group_size=st.none() | st.integers(2, 128),
    data=st.data(),
)
def test_formats_when_any_encoding_then_read_back(bits, scale, is_param, group_size, data):
    middle = 1 << (bits - 1)
    is_symmetric = data.draw(st.booleans())
    zeros = st.just(middle) if is_symmetric else st.integers(0, (1 << bits) - 1)
    encoding = Encoding(
        name="a.b",
        is_param=is_param,
        bits=bits,
        is_symmetric=is_symmetric,
        scale=tuple(scale),
        zero_point=tuple(data.draw(zeros) for _ in scale),
        group_size=group_size,
    )
    assert read_own(json.loads(json.dumps(write_own([encoding])))) == [encoding]
    assert read_lists(json.loads(json.dumps(write_lists([encoding])))) == [encoding]
    if group_size is None:
        assert read_dicts(json.loads(json.dumps(write_dicts([encoding])))) == [encoding]
    else:
        with pytest.raises(UnsupportedError, match="no groups"):
            write_dicts([encoding])


@pytest.mark.parametrize("offset", [0, -127, -128, -128.0])
def test_read_when_symmetric_then_every_writers_offset_is_the_middle(offset):
    row = {"name": "w", "bw": 8, "is_sym": True, "scale": [0.5], "offset": [offset]}
    (found,) = read_lists({"version": "1.0.0", "param_encodings": [row]})
    assert found.zero_point == (128,)


def test_read_when_float_or_other_kinds_then_said():
    row = {"name": "w", "bw": 16, "dtype": "FLOAT", "enc_type": "PER_TENSOR"}
    (found,) = read_lists({"param_encodings": [row]})
    assert found.is_float
    with pytest.raises(ArtifactError, match="LPBQ"):
        read_lists({"param_encodings": [{**row, "dtype": "INT", "enc_type": "LPBQ"}]})
    with pytest.raises(ArtifactError, match="is no integer"):
        read_lists({"param_encodings": [
            {"name": "w", "bw": 8, "scale": [1.0], "offset": [-3.5]}
        ]})  # fmt: skip
    with pytest.raises(ArtifactError, match="inputs and outputs of a module"):
        read_dicts({"activation_encodings": {"conv": {"output": {"0": {}}}}})


@pytest.mark.parametrize(
    "scales", [ScaleFormat(dtype=torch.float16), ScaleFormat(double_group=16)], ids=str
)
@pytest.mark.parametrize("recipe", ["w4_g32", "w8"])
def test_export_when_scales_are_of_another_form_then_the_numbers_they_stand_for(
    recipe, scales, tmp_path
):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)), torch.randn(2, 64)
    program = torch.export.export(model.eval(), (x,))

    def prepared(**form):
        quantizer = pq.backends.get("onnx").quantizer(recipe)
        quantizer.remove_algorithm("balance_channels")
        quantizer = quantizer.with_scales(form["scales"]) if form else quantizer
        return pq.prepare_pt2e(program, quantizer)

    original = pq.convert_pt2e(prepared(scales=scales))
    assert pq.export_encodings(original, tmp_path / "e.json") == ()
    again = prepared()
    assert pq.import_encodings(again, tmp_path / "e.json") == ("0.weight", "2.weight")
    assert torch.equal(pq.convert_pt2e(again)(x), original(x))


@pytest.mark.parametrize("format", ["pt2e_quant", "aimet-1.0.0"])
def test_import_when_in_groups_then_the_same_packed_weights(format, tmp_path):
    pytest.importorskip("executorch", reason="its backend has the group-wise recipe")
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)), torch.randn(2, 64)
    quantizer = pq.backends.get("xnnpack").quantizer

    def prepared():
        return pq.prepare_pt2e(torch.export.export(model.eval(), (x,)), quantizer("a8w4_g32"))

    original = pq.convert_pt2e(prepared())
    left = pq.export_encodings(original, tmp_path / "e.json", format=format)
    assert left == ("input_1", "relu")  # activations have qparams of run time
    again = prepared()
    assert pq.import_encodings(again, tmp_path / "e.json") == ("0.weight", "2.weight")
    again = pq.convert_pt2e(again)
    for name, value in original.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name


class Joined(nn.Module):
    """A concatenation of a large and a small tensor; the small one is a result as well."""

    def __init__(self):
        super().__init__()
        self.large, self.small = nn.Conv2d(3, 4, 1), nn.Conv2d(3, 4, 1)
        self.last = nn.Conv2d(8, 4, 1)

    def forward(self, x):
        large, small = self.large(x), 0.01 * self.small(x)
        return self.last(torch.cat([large, small], 1)), small


@pytest.mark.parametrize("format", FORMATS)
def test_import_when_a_range_was_split_then_it_is_split_here(format, tmp_path):
    pytest.importorskip("onnxruntime", reason="its recipe splits ranges")
    torch.manual_seed(0)
    model, data = Joined().eval(), [torch.randn(1, 3, 8, 8) for _ in range(4)]
    quantizer = pq.backends.get("onnx").quantizer

    def prepared():
        return pq.prepare_pt2e(torch.export.export(model, (data[0],)), quantizer("int8"))

    original = pq.convert_pt2e(pq.calibrate(prepared(), data, progress=False))
    pq.export_encodings(original, tmp_path / "e.json", format=format)
    again = prepared()
    pq.import_encodings(again, tmp_path / "e.json")
    again = pq.convert_pt2e(pq.calibrate(again, data, progress=False))
    for left, right in zip(original(data[0]), again(data[0]), strict=True):
        assert torch.equal(left, right)
    assert pq.sqnr_db(model(data[0])[1], again(data[0])[1]) > 30
