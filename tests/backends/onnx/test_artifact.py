"""The artifact: its call, its file, what it refuses."""

import os
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

pytest.importorskip("onnxruntime", reason="the extra onnx is not installed")

import onnx

import pt2e_quant as pq
from pt2e_quant.backends.onnx.artifact import OnnxArtifact
from pt2e_quant.core.errors import ArtifactError, InputError


class Net(nn.Module):
    """A small CNN with a nested call and a nested result, a None and a number in it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3, padding=1)
        self.conv2 = nn.Conv2d(8, 8, 3, padding=1)
        self.fc = nn.Linear(8, 4)

    def forward(self, image: Tensor, *, extra: dict[str, Tensor], flag: bool = True) -> Any:
        x = F.max_pool2d(self.conv(image).relu(), 2)
        x = (self.conv2(x) + x).relu()
        logits = self.fc(x.mean((2, 3))) + extra["offset"]
        return {"logits": logits, "nothing": None, "pair": (x, 3), "same": logits, "in": image}


def lower(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], **shapes: Any) -> Any:
    ep = torch.export.export(model.eval(), args, kwargs, **shapes)
    backend = pq.backends.get("onnx")
    prepared = pq.prepare_pt2e(ep, backend.quantizer())
    batch = dict(zip(("image",), args, strict=True)) | kwargs
    pq.calibrate(prepared, [batch], progress=False)
    quantized = pq.convert_pt2e(prepared)
    return quantized, backend.lower(quantized)


def call(batch: int) -> tuple[Tensor, dict[str, Any]]:
    generator = torch.Generator().manual_seed(batch)
    image = torch.randn(batch, 1, 8, 8, generator=generator)
    return image, {"extra": {"offset": torch.randn(batch, 4, generator=generator)}}


@pytest.fixture(scope="module")
def net() -> tuple[Any, OnnxArtifact]:
    torch.manual_seed(0)
    image, kwargs = call(4)
    batch = torch.export.Dim("batch", min=1, max=32)
    shapes = {"image": {0: batch}, "extra": {"offset": {0: batch}}}
    quantized, artifact = lower(Net(), (image,), kwargs, dynamic_shapes=shapes)
    return quantized, artifact


def same(left: Any, right: Any) -> None:
    assert list(left) == list(right)
    assert left["nothing"] is None
    assert right["nothing"] is None
    assert left["pair"][1] == right["pair"][1] == 3
    for a, b in (
        (left["logits"], right["logits"]),
        (left["pair"][0], right["pair"][0]),
        (left["same"], right["same"]),
        (left["in"], right["in"]),
    ):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)


@pytest.mark.parametrize("batch", [1, 4, 7])
def test_run_when_called_as_the_float_module_then_its_structure_returns(
    net: tuple[Any, OnnxArtifact], batch: int
) -> None:
    quantized, artifact = net
    image, kwargs = call(batch)
    same(artifact.run(image, **kwargs), quantized(image, **kwargs))
    same(artifact.run(image=image, **kwargs), quantized(image, **kwargs))


def test_report_when_lowered_then_everything_heavy_is_integer(
    net: tuple[Any, OnnxArtifact],
) -> None:
    report = net[1].report
    assert report.integer_ops["QLinearConv"] == 2
    assert report.integer_ops["QLinearAdd"] == 1
    assert report.integer_ops["MatMulIntegerToFloat"] == 1
    # The head's pool, the float input's addition, and the input that is returned as it is.
    assert report.float_ops.items() >= {"Add": 1, "Identity": 1, "GlobalAveragePool": 1}.items()
    assert not {"Conv", "MatMul"} & report.float_ops.keys()
    (region,) = report.float_regions
    assert region.what == "DequantizeLinear for GlobalAveragePool"
    assert report.sqnr_canonical_db is not None
    assert report.sqnr_canonical_db > 60


def test_save_when_loaded_then_call_and_provenance_are_back(
    net: tuple[Any, OnnxArtifact], tmp_path: Path
) -> None:
    quantized, artifact = net
    path = tmp_path / "model.onnx"
    artifact.save(path)
    assert path.stat().st_size == artifact.size_bytes
    assert [p.name for p in tmp_path.iterdir()] == ["model.onnx"]
    assert not path.stat().st_mode & stat.S_IXUSR
    loaded = pq.backends.get("onnx").load(path)
    image, kwargs = call(3)
    same(loaded.run(image, **kwargs), quantized(image, **kwargs))
    assert loaded.report.provenance == artifact.report.provenance
    assert loaded.report.integer_ops == artifact.report.integer_ops
    assert loaded.report.sqnr_float_db == artifact.report.sqnr_float_db
    assert loaded.size_bytes == artifact.size_bytes


def test_save_when_folder_is_missing_then_error_names_the_path(
    net: tuple[Any, OnnxArtifact], tmp_path: Path
) -> None:
    with pytest.raises(ArtifactError, match="cannot write"):
        net[1].save(tmp_path / "no" / "model.onnx")


def test_save_when_target_is_a_folder_then_no_temporary_file_is_left(
    net: tuple[Any, OnnxArtifact], tmp_path: Path
) -> None:
    (tmp_path / "model.onnx").mkdir()
    with pytest.raises(ArtifactError, match="cannot write"):
        net[1].save(tmp_path / "model.onnx")
    assert os.listdir(tmp_path) == ["model.onnx"]


def test_load_when_file_is_missing_then_error_names_it(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="cannot read"):
        pq.backends.get("onnx").load(tmp_path / "no.onnx")


def test_load_when_file_is_damaged_then_error_says_so(tmp_path: Path) -> None:
    path = tmp_path / "bad.onnx"
    path.write_bytes(b"not a model")
    with pytest.raises(ArtifactError, match="does not load"):
        pq.backends.get("onnx").load(path)


def test_load_when_file_is_not_ours_then_error_says_so(
    net: tuple[Any, OnnxArtifact], tmp_path: Path
) -> None:
    model = onnx.load_from_string(net[1].model)
    del model.metadata_props[:]
    path = tmp_path / "foreign.onnx"
    path.write_bytes(model.SerializeToString())
    with pytest.raises(ArtifactError, match="not written by this package"):
        pq.backends.get("onnx").load(path)


def test_load_when_description_is_damaged_then_error_says_so(
    net: tuple[Any, OnnxArtifact], tmp_path: Path
) -> None:
    model = onnx.load_from_string(net[1].model)
    for entry in model.metadata_props:
        if entry.key == "pt2e_quant.record":
            entry.value = entry.value[: len(entry.value) // 2]
    path = tmp_path / "damaged.onnx"
    path.write_bytes(model.SerializeToString())
    with pytest.raises(ArtifactError, match="damaged"):
        pq.backends.get("onnx").load(path)


def test_run_when_shape_does_not_fit_then_error_before_the_runtime(
    net: tuple[Any, OnnxArtifact],
) -> None:
    with pytest.raises(InputError, match="image"):
        net[1].run(torch.randn(2, 1, 9, 8), extra={"offset": torch.randn(2, 4)})


def test_model_when_saved_then_names_dims_and_weights_are_kept(
    net: tuple[Any, OnnxArtifact],
) -> None:
    graph = onnx.load_from_string(net[1].model).graph
    assert graph.input[0].type.tensor_type.shape.dim[0].dim_param
    assert [o.name for o in graph.output][:2] == ["logits", "pair_0"]
    types = {t.name: t.data_type for t in graph.initializer}
    assert types["conv.weight_q"] == onnx.TensorProto.INT8
    assert types["conv.bias_q"] == onnx.TensorProto.INT32
    large = [t for t in graph.initializer if t.data_type == onnx.TensorProto.FLOAT]
    assert max(len(t.raw_data) for t in large) <= 4 * 8  # scales alone


def test_run_when_result_is_a_nested_list_then_it_returns_as_one() -> None:
    class Fields(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, image: Tensor) -> Any:
            return [self.fc(image), (image * 2,)]

    image = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))
    quantized, artifact = lower(Fields(), (image,), {})
    found, expected = artifact.run(image), quantized(image)
    assert isinstance(found, list)
    torch.testing.assert_close(found[1][0], expected[1][0])
    torch.testing.assert_close(found[0], expected[0], rtol=0, atol=1e-5)
