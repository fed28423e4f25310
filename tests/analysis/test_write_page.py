import pytest
import torch
from torch import nn

import pt2e_quant as pq
from benchmarks.models import resnet50
from pt2e_quant.core.errors import ConfigError
from tests.analysis.outlier_transformer import POOR, transformer
from tests.analysis.outlier_transformer import batches as outlier_batches
from tests.headless_browser import needs_browser, open_page

pytestmark = pytest.mark.usefixtures("integers_everywhere")

EXAMPLE = (torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0)),)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Hardswish(), nn.Flatten())
    return layers.append(nn.Linear(8 * 36, 4)).eval()


@pytest.fixture(scope="module")
def deep():
    """(artifact, program, input) of more than ten layers with long names."""
    torch.manual_seed(0)
    layers = [nn.Linear(8, 8) for _ in range(12)]
    model = nn.Sequential(*(nn.Sequential(layer, nn.ReLU()) for layer in layers)).eval()
    x = torch.randn(16, 8)
    program = torch.export.export(model, (x,))
    artifact = pq.quantize(program, calibration_data=[x], backend="onnx", progress=False)
    return artifact, program, x


@pytest.fixture(scope="module")
def artifact(model):
    return pq.quantize(model, EXAMPLE, calibration_data=EXAMPLE, backend="onnx", progress=False)


def titles(path):
    text = path.read_text()
    return [part.split("<")[0] for part in text.split("<h2>")[1:]]


def test_write_page_when_given_data_then_losses_graph_and_times_are_in_it(artifact, tmp_path):
    path = tmp_path / "page.html"
    pq.write_page(path, artifact, [(torch.randn(2, 3, 8, 8), "label")], inputs=0)
    found = titles(path)
    assert found[:4] == [
        *("Summary", "What the tensors hold", "Where in the graph", "Where the time goes")
    ]
    assert {"Sizes", "Quantized tensors", "Left float", "Notes"} <= set(found)


def test_to_html_when_without_data_then_what_the_report_knows(artifact, tmp_path):
    path = tmp_path / "page.html"
    artifact.report.to_html(path)
    assert titles(path)[:3] == ["Summary", "Sizes", "Quantized tensors"]
    assert "canonical graph against float" in artifact.report._repr_html_()
    assert "QLinearConv" in artifact.profile(torch.randn(2, 3, 8, 8))._repr_html_()


def test_write_page_when_loaded_from_a_file_then_without_pictures_unless_the_graph_is_given(
    artifact, model, tmp_path
):
    artifact.save(tmp_path / "a.onnx")
    loaded = pq.backends.get("onnx").load(tmp_path / "a.onnx")
    pq.write_page(tmp_path / "page.html", loaded, [torch.randn(2, 3, 8, 8)])
    found = titles(tmp_path / "page.html")
    assert "Where in the graph" not in found
    assert "Where the time goes" in found
    program, path = torch.export.export(model, EXAMPLE), tmp_path / "compared.html"
    batches = [torch.randn(2, 3, 8, 8)]
    pq.write_page(path, loaded, batches, reference=program)
    assert titles(path)[0] == "Which tensors hurt most"
    assert "What to do about it" not in titles(path)
    pq.write_page(path, loaded, batches, reference=program, quantized=artifact.quantized)
    assert {"What to do about it", "Where in the graph"} <= {*titles(path)}


def test_write_page_when_given_the_float_model_then_compares_with_it(artifact, model, tmp_path):
    path = tmp_path / "page.html"
    batches = iter([torch.randn(2, 3, 8, 8)])
    pq.write_page(path, artifact, batches, reference=torch.export.export(model, EXAMPLE))
    assert titles(path)[:5] == [
        *("Which tensors hurt most", "Summary", "What to do about it"),
        *("What the tensors hold", "Where in the graph"),
    ]
    assert "the error that a tensor adds by itself" in path.read_text()


@needs_browser
@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)])
def test_write_page_when_opened_then_every_figure_is_drawn(artifact, tmp_path, width, dark):
    path = tmp_path / "page.html"
    pq.write_page(path, artifact, [torch.randn(2, 3, 8, 8)])
    found = open_page(path, width=width, height=6000, dark=dark)
    assert found.complaints == []
    assert found.dom.count('data-drawn="yes"') == 4


TENTH_ROW = """
const rows = document.querySelectorAll("#s0 tbody tr"), page = document.documentElement;
return {
  title: document.querySelector("#s0 h2").textContent, rows: rows.length,
  bottom: rows[9].getBoundingClientRect().bottom, ready_ms: Number(page.dataset.ready),
  sideways: page.scrollWidth > page.clientWidth,
  table: document.querySelector("#s0 table").getBoundingClientRect().right,
};
"""


def ask(path, *, width, height):
    """Where the tenth row of a page's first table is, in a view of this size."""
    opened = open_page(path, width=width, height=height, script=TENTH_ROW)
    assert opened.complaints == []
    return opened.answer


@needs_browser
@pytest.mark.parametrize(("width", "height"), [(1280, 720), (390, 844)], ids=["desktop", "phone"])
def test_write_page_when_opened_then_the_ten_worst_tensors_are_seen_at_once(
    deep, tmp_path, width, height
):
    artifact, program, x = deep
    path = tmp_path / "page.html"
    pq.write_page(path, artifact, [x], reference=program)
    found = ask(path, width=width, height=height)
    assert (found["title"], found["rows"]) == ("Which tensors hurt most", 10)
    assert found["bottom"] <= height
    assert not found["sideways"]
    if width == 1280:
        assert found["table"] <= width


def test_write_page_when_channels_stand_out_then_the_line_to_add_is_on_it(tmp_path):
    model, batches = transformer(), outlier_batches(1)
    recipe = tmp_path / "poor.toml"
    POOR.save(recipe)
    program = torch.export.export(model, (batches[0],))
    artifact = pq.quantize(
        program,
        calibration_data=batches,
        backend="onnx",
        recipe=str(recipe),
        verify=False,
        progress=False,
    )
    pq.write_page(tmp_path / "page.html", artifact, batches, reference=program)
    text = (tmp_path / "page.html").read_text()
    assert '["outlier channels","layer_norm_3"' in text
    assert 'algorithms=[\\"smooth_quant\\"]' in text


@needs_browser
@pytest.mark.slow
def test_write_page_when_of_a_resnet50_then_small_soon_open_and_it_answers_at_once(tmp_path):
    model = resnet50(image=96)
    x = torch.randn(2, 3, 96, 96, generator=torch.Generator().manual_seed(0))
    program = torch.export.export(model, (x,))
    artifact = pq.quantize(
        program, calibration_data=[x], backend="onnx", verify=False, progress=False
    )
    path = tmp_path / "page.html"
    pq.write_page(path, artifact, [x], reference=program)
    assert path.stat().st_size < 5_000_000
    for width, height in ((1280, 720), (390, 844)):
        found = ask(path, width=width, height=height)
        assert (found["title"], found["rows"]) == ("Which tensors hurt most", 10)
        assert found["bottom"] <= height
        assert not found["sideways"]
        assert found["ready_ms"] < 2000


def test_write_page_when_the_graph_is_float_then_page_without_advice(artifact, model, tmp_path):
    program = torch.export.export(model, EXAMPLE)
    path = tmp_path / "page.html"
    pq.write_page(path, artifact, EXAMPLE, reference=program, quantized=program.module())
    assert "What to do about it" not in titles(path)
    with pytest.raises(ConfigError, match="this one is float"):
        pq.advise(program.module())
