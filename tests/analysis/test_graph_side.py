"""A graph whose values can be read, and replaced while it runs."""

import torch

from pt2e_quant.analysis.graph_side import GraphSide
from pt2e_quant.core.qdq import is_dequantize


def values_of(side, x, **given):
    found = {}
    results = side.run([x], lambda site, value: found.__setitem__(site.name, value), **given)
    return found, results


def test_run_when_a_value_is_quantized_then_it_is_shown_behind_its_dequantize(made):
    _, _, _, quantized, batches = made
    side = GraphSide(quantized, "")
    found, (result,) = values_of(side, batches[0])
    assert torch.equal(result, quantized(batches[0]))
    site = side.sites["conv2d_2"]
    assert is_dequantize(site.value)
    scale = float(site.qparams.scale)
    steps = found[site.name] / scale
    assert torch.allclose(steps, steps.round(), atol=1e-3)
    low, high = site.range_kept
    assert low <= float(found[site.name].min()) <= float(found[site.name].max()) <= high


def test_run_when_a_value_is_given_then_readers_get_it(made):
    _, _, _, quantized, batches = made
    side = GraphSide(quantized, "")
    found, (plain,) = values_of(side, batches[0])
    zeros = torch.zeros_like(found["mean"])
    _, (changed,) = values_of(side, batches[0], given={"mean": zeros})
    assert not torch.equal(plain, changed)
    assert torch.equal(changed[0], changed[1])


def test_run_when_the_graph_observes_then_its_ranges_stay(made):
    _, _, prepared, _, batches = made
    before = {k: v.clone() for k, v in prepared.state_dict().items()}
    values_of(GraphSide(prepared, ""), 100 * batches[0])
    assert all(torch.equal(v, before[k]) for k, v in prepared.state_dict().items())


def test_sites_when_every_value_is_asked_for_then_views_are_there_too():
    program = torch.export.export(torch.nn.Flatten(), (torch.ones(2, 3, 4),))
    assert {"flatten"} <= GraphSide(program.module(), "", every=True).sites.keys()


def test_inputs_of_when_a_value_is_not_known_then_what_it_is_made_of(made):
    side = GraphSide(made[3], "")
    assert side.inputs_of("linear", {"relu": 1, "conv2d": 1}) == {"relu"}


def test_run_when_weights_are_constant_then_they_are_dequantized_in_the_first_run_alone(made):
    side = GraphSide(made[3], "")
    runs = []
    for batch in made[4]:
        weights = {}
        side.run([batch], lambda site, value: None, weights=weights)
        runs.append(weights)
    first, second = runs
    quantized = [name for name, site in side.weights.items() if site.qparams is not None]
    assert quantized
    assert all(first[name] is second[name] for name in quantized)
    assert torch.equal(second["stem.weight"], first["stem.weight"])
    assert second["stem.weight"].is_floating_point()
