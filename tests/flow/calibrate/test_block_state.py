"""A run that was stopped goes on where it was, or says why it cannot."""

import json

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import pt2e_quant as pq
from pt2e_quant.core.errors import ArtifactError
from pt2e_quant.core.provenance import provenance_of
from pt2e_quant.flow.calibrate import calibrate_by_block as by_block
from pt2e_quant.passes.algorithms.low_rank import LowRank
from pt2e_quant.passes.algorithms.registry import OWN_NAMES, algorithm_named

WIDTH = 32
STREAMED = (
    ("awq", "w4_g32"),
    ("gptq", "w4"),
    (LowRank(rank=4, least_gain=1.0), "w4"),
    ("lwc", "w4"),
    ("scale_outputs", "int8"),
    ("smooth_quant", "int8"),
)


def model() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(4)]
    with torch.no_grad():
        for norm, linear in layers[1:]:  # channels that int8 has to care for
            norm.weight[3], linear.weight[5] = norm.weight[3] * 30, linear.weight[5] * 60
    return nn.Sequential(*layers).eval()


def samples(seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(2, 8, WIDTH, generator=generator) for _ in range(3)]


def prepared(*algorithms, recipe="a8w4_g32"):
    program = torch.export.export(model(), (samples()[0],))
    backend = "xnnpack" if recipe == "int8" else "onnx"
    quantizer = pq.backends.get(backend).quantizer(recipe)
    if recipe == "int8":  # whose linears between norms would have no calibrated ranges to scale
        quantizer.remove_algorithm("run_time_scales")
    return pq.prepare_pt2e(program, quantizer, algorithms=algorithms or ("awq", "gptq"))


@pytest.fixture
def ran(monkeypatch) -> list[int]:
    """The numbers of the blocks that were done; a 99 in it stops the run after two."""
    found: list[int] = []
    optimise = by_block._optimise

    def note(run, number, algorithms):
        if 99 in found and number == 2:
            raise KeyboardInterrupt
        found.append(number)
        optimise(run, number, algorithms)

    monkeypatch.setattr(by_block, "_optimise", note)
    return found


def stopped(folder, ran, *algorithms, **how) -> None:
    ran.append(99)
    gm = prepared(*algorithms, **how)
    with pytest.raises(KeyboardInterrupt):
        pq.calibrate_by_block(gm, samples(), resume=folder, progress=False)
    ran.clear()


def test_run_when_stopped_then_goes_on_and_ends_with_the_same_graph(tmp_path, ran):
    whole = pq.convert_pt2e(pq.calibrate_by_block(prepared(), samples(), progress=False))
    blocks = len(ran)
    assert blocks > 3
    ran.clear()
    stopped(tmp_path, ran)
    gm = pq.calibrate_by_block(prepared(), samples(), resume=tmp_path, progress=False)
    assert ran == list(range(2, blocks))
    converted = pq.convert_pt2e(gm)
    for x in samples(seed=1):
        assert torch.equal(converted(x), whole(x))
    ran.clear()
    again = pq.calibrate_by_block(prepared(), samples(), resume=tmp_path, progress=False)
    assert not ran
    assert torch.equal(pq.convert_pt2e(again)(samples()[0]), whole(samples()[0]))


def test_streamed_algorithms_when_listed_then_all_that_gather_statistics():
    named = {getattr(given, "name", given) for given, _ in STREAMED}
    own = map(algorithm_named, OWN_NAMES)
    watching = {a.name for a in own if a.watches_sites and not a.needs_calls}
    assert named == watching - {"own_ranges"}  # it is for concatenations: these models have none


@pytest.mark.parametrize(("algorithm", "recipe"), STREAMED, ids=str)
def test_algorithm_when_its_run_was_stopped_then_the_same_graph(tmp_path, ran, algorithm, recipe):
    gm = pq.calibrate_by_block(prepared(algorithm, recipe=recipe), samples(), progress=False)
    whole = pq.convert_pt2e(gm)
    assert any(record.steps for record in provenance_of(whole).tensors)
    ran.clear()
    stopped(tmp_path, ran, algorithm, recipe=recipe)
    gm = prepared(algorithm, recipe=recipe)
    gm = pq.calibrate_by_block(gm, samples(), resume=tmp_path, progress=False)
    assert ran[0] == 2
    converted = pq.convert_pt2e(gm)
    for x in samples(seed=1):
        assert torch.equal(converted(x), whole(x))


def test_files_when_a_block_is_done_then_only_what_it_changed(tmp_path):
    pq.calibrate_by_block(prepared("gptq"), samples(), resume=tmp_path, progress=False)
    for number in range(4):
        held = load_file(tmp_path / f"block-{number:05d}.safetensors")
        weights = [name for name in held if name.endswith("1.weight")]
        assert weights == [f"{number}.1.weight"]


@pytest.mark.parametrize("other", ["data", "settings"])
def test_folder_when_of_another_run_then_refused(tmp_path, other):
    pq.calibrate_by_block(prepared(), samples(), resume=tmp_path, progress=False)
    gm = prepared("gptq") if other == "settings" else prepared()
    data = samples(seed=5 if other == "data" else 0)
    with pytest.raises(ArtifactError, match="holds the state of another run"):
        pq.calibrate_by_block(gm, data, resume=tmp_path, progress=False)


@pytest.mark.parametrize("text", ["", "[1]", json.dumps({"blocks": 2})])
def test_state_when_it_cannot_be_read_then_refused(tmp_path, text):
    (tmp_path / "state.json").write_text(text)
    with pytest.raises(ArtifactError, match="holds the state of another run"):
        pq.calibrate_by_block(prepared(), samples(), resume=tmp_path, progress=False)


def test_file_when_damaged_then_refused(tmp_path, ran):
    stopped(tmp_path, ran)
    path = tmp_path / "block-00000.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(ArtifactError, match="is damaged"):
        pq.calibrate_by_block(prepared(), samples(), resume=tmp_path, progress=False)
