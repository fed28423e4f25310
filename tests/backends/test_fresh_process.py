"""Every kind of saved file: run by a process that has lowered nothing, and refused once damaged."""

import random
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim

import pt2e_quant as pq
from pt2e_quant.backends import registry
from pt2e_quant.core.errors import ArtifactError, ConfigError, UnsupportedError
from tests.backends.call_saved import Saved, call_saved

pytestmark = pytest.mark.usefixtures("unmeasured")

NEEDS = {"xnnpack": "executorch", "onnx": "onnxruntime", "cpu": "torch", "": "torch"}
BATCHES = (2, 48, 2)


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.linear = nn.Conv2d(3, 16, 3, padding=1), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"logits": self.linear(F.relu(self.conv(x)).mean((2, 3)))}


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, 64)
        self.first, self.second = nn.Linear(64, 96), nn.Linear(96, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.gelu(self.first(self.embed(x))))


@dataclass(frozen=True)
class Kind:
    """A kind of file: the backend ("" for an archive), the recipe, and the model."""

    backend: str
    recipe: str
    model: type[nn.Module]


KINDS = (
    Kind("xnnpack", "int8", Images),
    Kind("xnnpack", "int8_dynamic", Tokens),
    Kind("xnnpack", "a8w4_g32", Tokens),
    Kind("onnx", "int8", Images),
    Kind("onnx", "w4_g32", Tokens),
    Kind("cpu", "int8", Images),
    Kind("cpu", "w8", Tokens),
    Kind("", "int8", Images),
)
HERE = [kind for kind in KINDS if find_spec(NEEDS[kind.backend])]


def inputs_of(kind: Kind, batch: int) -> Tensor:
    draws = torch.Generator().manual_seed(batch)
    if kind.model is Images:
        return torch.randn(batch, 3, 8, 8, generator=draws)
    return torch.randint(0, 100, (batch, 5), generator=draws)


def saved(kind: Kind, path: Any) -> None:
    torch.manual_seed(0)
    x = inputs_of(kind, 4)
    data = [(x,)] if kind.model is Images else None
    if not kind.backend:
        ep = torch.export.export(kind.model().eval(), (x,), dynamic_shapes=({0: Dim.AUTO},))
        prepared = pq.prepare_pt2e(ep, registry.get("cpu").allowing_slower().quantizer(kind.recipe))
        pq.save(pq.convert_pt2e(pq.calibrate(prepared, data, progress=False)), path)
        return
    backend = registry.get(kind.backend)
    artifact = pq.quantize(
        kind.model(),
        (x,),
        dynamic_shapes=({0: Dim.AUTO},),
        calibration_data=data,
        backend=backend.allowing_slower() if kind.backend == "cpu" else backend,
        recipe=kind.recipe,
        max_sizes={"x": {0: 48}},
        strict=False,
        progress=False,
    )
    assert "(1 to 48, " in artifact.report.inputs[0]
    artifact.save(path)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[Kind, Saved]:
    folder = tmp_path_factory.mktemp("files")
    made = {}
    for at, kind in enumerate(HERE):
        suffix = registry.get(kind.backend).suffix if kind.backend else ".pt2q"
        path = folder / f"{at}{suffix}"
        saved(kind, path)
        made[kind] = Saved(kind.backend, path, [(inputs_of(kind, batch),) for batch in BATCHES])
    return made


@torch.no_grad()
def test_every_kind_of_file_when_loaded_by_another_process_then_runs_at_all_sizes(files, tmp_path):  # type: ignore[no-untyped-def]
    found = call_saved(list(files.values()), tmp_path)
    for (kind, file), results in zip(files.items(), found, strict=True):
        torch.manual_seed(0)
        model = kind.model().eval()
        for (x,), result in zip(file.calls, results, strict=True):
            wanted = model(x)
            pairs = (
                (result["logits"], wanted["logits"])
                if isinstance(wanted, dict)
                else (result, wanted)
            )
            assert pairs[0].shape == pairs[1].shape
            # The least of a sound model in 4 bits; memory that was written over gives less.
            assert pq.sqnr_db([wanted], [result]) > 12, kind


@pytest.mark.parametrize("kind", [k for k in HERE if k.backend in ("xnnpack", "onnx")], ids=str)
def test_a_file_when_any_bit_is_flipped_or_it_is_cut_then_load_refuses_it(files, tmp_path, kind):  # type: ignore[no-untyped-def]
    data = files[kind].path.read_bytes()
    draws = random.Random(0)
    mark = data.index(b"pt2e_quant.sha256:")
    bits = [draws.randrange(8 * len(data)) for _ in range(60)]
    bits += [8 * (mark + at) for at in (0, 17, 18, 81)] + [0, 8 * 4, 8 * len(data) - 1]
    path = tmp_path / files[kind].path.name
    for bit in bits:
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << (bit % 8)
        path.write_bytes(damaged)
        with pytest.raises(ArtifactError):
            registry.get(kind.backend).load(path)
    for length in (0, 7, 100, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:length])
        with pytest.raises(ArtifactError):
            registry.get(kind.backend).load(path)


@pytest.mark.skipif(not find_spec("executorch"), reason="needs executorch")
def test_a_pte_when_a_dimension_has_no_largest_size_then_refused_with_the_line():  # type: ignore[no-untyped-def]
    x = torch.randint(0, 100, (4, 5))
    for dim in (Dim.AUTO, Dim("batch")):
        with pytest.raises(UnsupportedError, match="no largest size") as error:
            pq.quantize(
                Tokens(), (x,), dynamic_shapes=({0: dim},), backend="xnnpack", recipe="int8_dynamic"
            )
        assert "max_sizes={'x': {0: 64}}" in str(error.value)
        assert "dynamic_shapes={'x': {0: Dim(" in str(error.value)
        assert "max=64" in str(error.value)
        assert error.value.node_name == "embedding"  # reads x first


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"y": {0: 64}}, 'max_sizes names "y"'),
        ({"x": {1: 64}}, "is not dynamic"),
        ({"x": {0: 3}}, "below the example's size"),
        ({"x": 64}, 'max_sizes names "x"'),
    ],
)
def test_max_sizes_when_they_fit_no_input_then_refused(sizes, words):  # type: ignore[no-untyped-def]
    x = torch.randint(0, 100, (4, 5))
    with pytest.raises(ConfigError, match=words):
        pq.quantize(
            Tokens(),
            (x,),
            dynamic_shapes=({0: Dim.AUTO},),
            backend="cpu",
            recipe="w8",
            max_sizes=sizes,
        )


@pytest.mark.parametrize("backend", ["onnx", "xnnpack", "cpu"])
def test_report_when_a_file_is_loaded_then_its_figures_are_those_of_the_check(backend, tmp_path):
    pytest.importorskip(NEEDS[backend])
    torch.manual_seed(0)
    x = torch.randn(4, 3, 16, 16)
    made = pq.quantize(Images(), (x,), calibration_data=[x], backend=backend, progress=False)
    path = tmp_path / f"images{pq.backends.get(backend).suffix}"
    made.save(path)
    found = pq.backends.get(backend).load(path).report
    assert found.sqnr_float_db == pytest.approx(made.report.sqnr_float_db, rel=1e-5)
    assert found.sqnr_canonical_db == pytest.approx(made.report.sqnr_canonical_db, rel=1e-5)
    assert found.size_bytes == path.stat().st_size == made.report.size_bytes
    assert found.float_size_bytes == sum(4 * p.numel() for p in Images().parameters())
