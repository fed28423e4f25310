"""The file: saved whole or not at all, everything needed to run it again inside."""

import sys
from collections.abc import Callable

import pytest
import torch
from executorch.exir import to_edge_transform_and_lower
from torch import Tensor, nn

import pt2e_quant as pq
from pt2e_quant.backends.xnnpack.backend import BACKEND
from pt2e_quant.backends.xnnpack.contents import read_named_data
from pt2e_quant.backends.xnnpack.metadata import pack_metadata, scale_key, unpack_provenance
from pt2e_quant.core.errors import ArtifactError, InputError, MissingExtraError


class TwoInputs(nn.Module):
    """Keyword inputs, a literal one, nested outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(6, 4), nn.Linear(6, 4)

    def forward(self, x: Tensor, *, other: Tensor | None = None, scale: float = 2.0):  # type: ignore[no-untyped-def]
        left = self.left(x)
        right = self.right(x if other is None else other)
        return {"sum": left + right, "parts": (left * scale, [right])}


@pytest.fixture
def lowered(make_noise):  # type: ignore[no-untyped-def]
    from pt2e_quant.flow.calibrate.calibrate import calibrate
    from pt2e_quant.flow.convert.convert_pt2e import convert_pt2e
    from pt2e_quant.flow.prepare.prepare_pt2e import prepare_pt2e

    kwargs = {"other": make_noise((3, 6), 1), "scale": 2.0}
    model = TwoInputs().eval()
    ep = torch.export.export(model, (make_noise((3, 6)),), kwargs)
    prepared = prepare_pt2e(ep, BACKEND.quantizer())
    calibrate(prepared, [{"x": make_noise((3, 6)), **kwargs}], progress=False)
    return BACKEND.lower(convert_pt2e(prepared))


def test_artifact_when_saved_and_loaded_then_runs_the_models_own_call(
    lowered, make_noise, tmp_path
):  # type: ignore[no-untyped-def]
    path = tmp_path / "model.pte"
    lowered.save(path)
    loaded = BACKEND.load(path)
    x, other = make_noise((3, 6), 5), make_noise((3, 6), 6)
    before, after = lowered.run(x, other=other), loaded.run(x, other=other, scale=2.0)
    assert set(after) == {"sum", "parts"}
    assert isinstance(after["parts"], tuple)
    assert torch.equal(before["sum"], after["sum"])
    assert torch.equal(before["parts"][1][0], after["parts"][1][0])
    kept, read = lowered.report.provenance, loaded.report.provenance
    assert [t.name for t in kept.tensors] == [t.name for t in read.tensors]
    assert kept.to_json() == read.to_json()
    # Per-channel scales are not written out again: the delegate's own are read.
    weights = [t for t in kept.tensors if len(t.scale) > 1]
    assert weights
    assert all(scale_key(t.scale) in read_named_data(lowered.pte) for t in weights)
    assert loaded.report.integer_ops == lowered.report.integer_ops
    assert [p.name for p in tmp_path.iterdir()] == ["model.pte"]
    with pytest.raises(InputError):
        loaded.run(make_noise((4, 6)), other=other)


def test_save_when_path_cannot_be_written_then_error_and_no_leftover(lowered, tmp_path):  # type: ignore[no-untyped-def]
    with pytest.raises(ArtifactError, match="cannot write"):
        lowered.save(tmp_path / "absent" / "model.pte")
    (tmp_path / "folder.pte").mkdir()
    with pytest.raises(ArtifactError, match="cannot write"):
        lowered.save(tmp_path / "folder.pte")
    assert [p.name for p in tmp_path.iterdir()] == ["folder.pte"]


def test_load_when_file_is_not_ours_then_says_so(tmp_path, make_noise):  # type: ignore[no-untyped-def]
    with pytest.raises(ArtifactError, match="cannot read"):
        BACKEND.load(tmp_path / "absent.pte")
    garbage = tmp_path / "garbage.pte"
    garbage.write_bytes(b"not a program")
    with pytest.raises(ArtifactError, match="no ExecuTorch program"):
        BACKEND.load(garbage)
    foreign = tmp_path / "foreign.pte"
    ep = torch.export.export(nn.Linear(4, 4), (make_noise((1, 4)),))
    foreign.write_bytes(bytes(to_edge_transform_and_lower(ep).to_executorch().buffer))
    with pytest.raises(ArtifactError, match="not written by this package"):
        BACKEND.load(foreign)


def test_artifact_when_a_buffer_is_written_then_check_run_leaves_no_trace(make_noise):  # type: ignore[no-untyped-def]
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("total", torch.zeros(2, 4))

        def forward(self, x: Tensor) -> Tensor:
            self.total.add_(self.linear(x))
            return self.total * 1.0

    from pt2e_quant.flow.calibrate.calibrate import calibrate
    from pt2e_quant.flow.convert.convert_pt2e import convert_pt2e
    from pt2e_quant.flow.prepare.prepare_pt2e import prepare_pt2e

    model, x = Counter().eval(), make_noise((2, 4))
    prepared = prepare_pt2e(torch.export.export(model, (x,)), BACKEND.quantizer())
    calibrate(prepared, [(x,)], progress=False)
    artifact = BACKEND.lower(convert_pt2e(prepared))
    first, second = artifact.run(x), artifact.run(x)
    assert torch.allclose(first, model.linear(x), atol=0.05)
    assert torch.allclose(second, 2 * first, atol=1e-5)


class WritesInputs(nn.Module):
    def __init__(self, write: Callable[[nn.Linear, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.write = write

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.write(self.linear, x, y)


@pytest.mark.parametrize(
    "write",
    [
        lambda linear, x, y: linear(x.mul_(2.0)),
        lambda linear, x, y: (linear(x), x.add_(1.0))[0],
        lambda linear, x, y: (linear(x), x.copy_(y), y.zero_())[0],
        lambda linear, x, y: linear(x.add_(y).relu_()) + x,
    ],
)
def test_inputs_when_a_model_writes_them_as_a_whole_then_run_writes_them(write, make_noise):  # type: ignore[no-untyped-def]
    model = WritesInputs(write).eval()
    batches = [(make_noise((2, 4), 2 * n), make_noise((2, 4), 2 * n + 1)) for n in range(3)]
    artifact = pq.quantize(
        model, batches[0], calibration_data=batches, backend="xnnpack", progress=False
    )
    given, expected = [tuple(v.clone() for v in batches[0]) for _ in range(2)]
    found, wanted = artifact.run(*given), model(*expected)
    assert torch.allclose(found, wanted, atol=0.1)
    for after, wanted in zip(given, expected, strict=True):
        assert torch.equal(after, wanted)
    assert not torch.equal(given[0], batches[0][0])


def test_backend_when_executorch_is_missing_then_says_what_installs_it(monkeypatch, tmp_path):  # type: ignore[no-untyped-def]
    monkeypatch.setitem(sys.modules, "executorch", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'pt2e-quant\[xnnpack\]'"):
        BACKEND.load(tmp_path / "model.pte")
    assert BACKEND.quantizer() is not None


def test_metadata_when_scales_are_not_held_then_written_out(lowered):  # type: ignore[no-untyped-def]
    report = lowered.report
    packed, _ = pack_metadata(lowered.capture, report.provenance, ())
    stored = packed["pt2e_quant_provenance"].numpy().tobytes()
    assert unpack_provenance(stored, {}).to_json() == report.provenance.to_json()
    keys = [scale_key(t.scale) for t in report.provenance.tensors]
    short, _ = pack_metadata(lowered.capture, report.provenance, keys)
    with pytest.raises(ArtifactError, match="damaged"):
        unpack_provenance(short["pt2e_quant_provenance"].numpy().tobytes(), {})


def test_metadata_when_two_keys_begin_alike_then_their_scales_are_written_out(lowered):  # type: ignore[no-untyped-def]
    table = lowered.report.provenance
    keys = [scale_key(t.scale) for t in table.tensors]
    packed, _ = pack_metadata(lowered.capture, table, [*keys, *(f"{key[:20]}…" for key in keys)])
    stored = packed["pt2e_quant_provenance"].numpy().tobytes()
    assert unpack_provenance(stored, {}).to_json() == table.to_json()


def test_run_when_an_input_without_elements_has_other_strides_then_taken():
    """ExecuTorch ends the process at strides that are not its own, also where nothing is read."""

    class Beside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor, empty: Tensor) -> Tensor:
            return self.linear(x)

    model, x = Beside().eval(), torch.ones(2, 4)
    empty = torch.randn(2, 10, 1, 0).to(memory_format=torch.channels_last)
    artifact = pq.quantize(model, (x, empty), calibration_data=[(x, empty)], backend="xnnpack")
    torch.testing.assert_close(artifact.run(x, empty), model(x, empty), rtol=0.1, atol=0.1)
