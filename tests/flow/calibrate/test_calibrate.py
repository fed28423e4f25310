"""Batches of every form reach the observers; a sample call is kept."""

import pytest
import torch
from torch.export import export

from pt2e_quant.core.errors import ConfigError, InputError
from pt2e_quant.flow.calibrate.calibrate import calibrate
from pt2e_quant.flow.calibrate.sample import sample_of
from pt2e_quant.flow.prepare.prepare_pt2e import prepare_captured, prepare_pt2e
from pt2e_quant.flow.prepare.prepared import observers_of


@pytest.fixture
def prepared(net, quantizer, images, batch_dim):
    return prepare_pt2e(export(net, (images[0],), dynamic_shapes=batch_dim), quantizer())


def _range_of_input(gm):
    _, observer = next((n, o) for n, o in observers_of(gm) if n.args[0].name == "x")
    return float(observer.min_val), float(observer.max_val)


@pytest.mark.parametrize(
    "wrap",
    [lambda x: x, lambda x: (x,), lambda x: [x], lambda x: {"x": x}],
    ids=["tensor", "tuple", "list", "dict"],
)
def test_calibrate_when_batches_take_any_form_then_each_is_one_call(prepared, images, wrap):
    calibrate(prepared, [wrap(image) for image in images], progress=False)
    assert _range_of_input(prepared) == (
        float(min(i.min() for i in images)),
        float(max(i.max() for i in images)),
    )


def test_calibrate_when_a_generator_varies_its_sizes_then_all_are_observed(prepared, images):
    calibrate(prepared, (image[:n] for n, image in enumerate(images, 2)), progress=False)
    assert _range_of_input(prepared)[1] == float(max(i[:n].max() for n, i in enumerate(images, 2)))


@pytest.mark.parametrize("data", [torch.zeros(4, 3, 8, 8), {"x": torch.zeros(4, 3, 8, 8)}])
def test_calibrate_when_given_one_batch_then_refused_with_the_fix(prepared, data):
    with pytest.raises(InputError, match=r"iterable of batches") as error:
        calibrate(prepared, data, progress=False)
    assert "calibrate(prepared, [batch])" in str(error.value)


def test_calibrate_when_the_graph_is_not_prepared_then_refused(net, images):
    with pytest.raises(ConfigError, match="not prepared"):
        calibrate(export(net, (images[0],)).module(), images)


def test_calibrate_when_done_then_the_first_batch_is_kept_as_sample(prepared, net, images):
    calibrate(prepared, images, progress=False)
    sample = sample_of(prepared)
    assert torch.equal(sample.leaves[0], images[0])
    assert sample.leaves[0].data_ptr() != images[0].data_ptr()
    with torch.no_grad():
        expected = net(images[0])["logits"]
    torch.testing.assert_close(sample.float_outputs[0], expected, rtol=1e-5, atol=1e-5)


def test_prepared_when_called_without_calibrate_then_the_first_call_is_kept(net, quantizer, images):
    class Stateless(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = torch.nn.Linear(4, 4)

        def forward(self, x):
            return self.fc(x)

    model, x = Stateless().eval(), torch.randn(2, 4)
    gm = prepare_pt2e(export(model, (x,)), quantizer())
    gm(x)
    gm(torch.zeros(2, 4))
    sample = sample_of(gm)
    assert torch.equal(sample.leaves[0], x)
    torch.testing.assert_close(sample.float_outputs[0], model(x).detach())


def test_weights_when_calibrated_then_observed_once(net, quantizer, images):
    gm = export(net, (images[0],)).module()
    prepared = prepare_captured(gm, quantizer(), strict=True, observe_constants=True)
    calibrate(prepared, images[:1], progress=False)
    weights = [o for n, o in observers_of(prepared) if o.observes_constant]
    assert len(weights) == 3
    with torch.no_grad():
        for observer in weights:
            observer(torch.full((8, 8, 3, 3), 1e6))
            assert float(observer.max_val.max()) < 10


def test_calibrate_when_the_model_writes_its_input_then_batches_and_sample_stay(quantizer):
    class Shift(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x.add_(1.0)
            return self.linear(x)

    batch = torch.ones(2, 4)
    ep = torch.export.export(Shift().eval(), (torch.ones(2, 4),))
    prepared = prepare_pt2e(ep, quantizer())
    calibrate(prepared, [(batch,), (batch,)], progress=False)
    assert torch.equal(batch, torch.ones(2, 4))
    assert torch.equal(sample_of(prepared).leaves[0], torch.ones(2, 4))
