"""A metric of every form of a model."""

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import pt2e_quant as pq
from pt2e_quant.core.errors import ConfigError, InputError
from tests.analysis.test_metric import Accuracy, share_right


@pytest.fixture(scope="module")
def loader(made):
    """Pairs of images and the float model's own answers, the last of them wrong."""
    model, *_, batches = made
    images = torch.cat(batches)
    with torch.no_grad():
        labels = model(images).argmax(-1)
    labels[-1] = (labels[-1] + 1) % 10
    return DataLoader(TensorDataset(images, labels), batch_size=4)


def test_evaluate_when_the_model_takes_any_form_then_the_metric_is_that_of_its_outputs(
    made, loader
):
    model, program, prepared, quantized, _ = made
    reference = pq.integer_reference(quantized)
    artifact = pq.backends.get("cpu").lower(quantized, verify=False)
    for form in (model, program, program.module(), prepared, quantized, reference, artifact):
        assert pq.evaluate(form, loader, share_right, progress=False) == 7 / 8
        assert pq.evaluate(form, loader, Accuracy(), progress=False) == 7 / 8


def test_evaluate_when_a_graph_is_prepared_then_its_ranges_stay(made, loader):
    prepared = made[2]
    before = {name: value.clone() for name, value in prepared.state_dict().items()}
    doubled = [(9 * images, labels) for images, labels in loader]
    pq.evaluate(prepared, doubled, share_right, progress=False)
    assert all(torch.equal(v, before[name]) for name, v in prepared.state_dict().items())


def test_evaluate_when_batches_are_dicts_or_arrays_then_parts_are_picked(made, loader):
    quantized = made[3]
    dicts = [{"x": images.numpy(), "labels": labels.numpy()} for images, labels in loader]
    assert pq.evaluate(quantized, dicts, share_right, progress=False) == 7 / 8
    rows = ({"id": [1], "pixels": i.tolist(), "kind": t.tolist()} for i, t in loader)
    picked = pq.evaluate(
        quantized, rows, share_right, inputs="pixels", targets="kind", progress=False
    )
    assert picked == 7 / 8
    assert isinstance(dicts[0]["x"], np.ndarray)


def test_evaluate_when_a_batch_does_not_fit_then_it_is_named_with_the_argument(made, loader):
    quantized = made[3]
    triples = [(images, labels, labels) for images, labels in loader]
    with pytest.raises(InputError, match=r"evaluation batch 0(?s:.)*inputs=0"):
        pq.evaluate(quantized, triples, share_right, progress=False)
    with pytest.raises(ConfigError, match="no batch"):
        pq.evaluate(quantized, [], share_right, progress=False)
    with pytest.raises(ConfigError, match="found int"):
        pq.evaluate(3, loader, share_right, progress=False)


def test_evaluate_when_samples_are_in_lists_then_every_form_takes_them(made, loader):
    model, program, _, quantized, _ = made
    rows = [{"pixels": list(images), "labels": list(labels)} for images, labels in loader]
    for form in (model, program, quantized):
        found = pq.evaluate(form, rows, share_right, inputs="pixels", progress=False)
        assert found == 7 / 8
    assert pq.compare(model, quantized, rows, inputs="pixels", progress=False).batches == 2


def test_evaluate_when_a_module_or_program_refuses_a_batch_then_the_error_names_inputs(
    made, loader
):
    model, program, *_ = made
    texts = [{"x": images, "text": ["a"] * 4, "labels": labels} for images, labels in loader]
    for form, says in ((model, "inputs=0"), (program, r"evaluate\(…, inputs=\['x'\]\)")):
        with pytest.raises(InputError, match=f"evaluation batch 0(?s:.)*{says}"):
            pq.evaluate(form, texts, share_right, progress=False)


def test_evaluate_when_given_no_batches_then_the_error_shows_the_call(made):
    with pytest.raises(InputError, match=r"evaluate\(model, \[batch\], metric\)"):
        pq.evaluate(made[0], torch.ones(4, 3, 24, 24), share_right, progress=False)
