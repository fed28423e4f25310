import pytest
import torch
from torch import nn

import pt2e_quant as pq
from tests.headless_browser import needs_browser, open_page

EXAMPLE = (torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0)),)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Hardswish(), nn.Flatten())
    return layers.append(nn.Linear(8 * 36, 4)).eval()


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


def test_write_page_when_loaded_from_a_file_then_without_pictures_of_the_graph(artifact, tmp_path):
    artifact.save(tmp_path / "a.onnx")
    loaded = pq.backends.get("onnx").load(tmp_path / "a.onnx")
    pq.write_page(tmp_path / "page.html", loaded, [torch.randn(2, 3, 8, 8)])
    found = titles(tmp_path / "page.html")
    assert "Where in the graph" not in found
    assert "Where the time goes" in found


def test_write_page_when_given_the_float_model_then_compares_with_it(artifact, model, tmp_path):
    path = tmp_path / "page.html"
    batches = iter([torch.randn(2, 3, 8, 8)])
    pq.write_page(path, artifact, batches, reference=torch.export.export(model, EXAMPLE))
    assert titles(path)[1:4] == [
        *("Which tensors hurt most", "What the tensors hold", "Where in the graph")
    ]
    assert "the error that a tensor adds by itself" in path.read_text()


@needs_browser
@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)])
def test_write_page_when_opened_then_every_figure_is_drawn(artifact, tmp_path, width, dark):
    path = tmp_path / "page.html"
    pq.write_page(path, artifact, [torch.randn(2, 3, 8, 8)])
    found = open_page(path, tmp_path / "browser", width=width, height=6000, dark=dark)
    assert found.complaints == []
    assert found.dom.count('data-drawn="yes"') == 4
