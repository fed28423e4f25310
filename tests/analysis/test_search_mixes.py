import pytest
import torch

import pt2e_quant as pq
from pt2e_quant.analysis import search_mixes
from pt2e_quant.analysis.bench_mixes import Bench
from pt2e_quant.analysis.latency import Latency, Stopwatch
from pt2e_quant.analysis.menu import is_product, share_quantized
from pt2e_quant.core.errors import ConfigError, UnsupportedError
from pt2e_quant.core.qdq import is_dequantize
from pt2e_quant.graph.meta import origin_name
from tests.analysis.outlier_transformer import POOR, batches, transformer

pytestmark = pytest.mark.usefixtures("integers_everywhere")

OPTIONS = {"backend": "onnx", "points": 0, "progress": False}


def test_search_when_the_recipe_itself_meets_the_target_then_it_stays():
    data = batches(1)
    found = pq.tune(
        transformer(), (data[0],), calibration_data=data, target=0.5, menu=(), **OPTIONS
    )
    assert {choice.scheme for choice in found.choices} == {"int8"}
    assert found.recipe.rules == ()
    assert "int8 throughout" in str(found)
    assert '"share_quantized": 1.0' in found.to_json()


def test_search_when_only_float_meets_the_target_then_refused():
    data = batches(1)
    with pytest.raises(UnsupportedError, match="nothing would be quantized"):
        pq.tune(
            transformer(),
            (data[0],),
            calibration_data=data,
            target=0.99999999,
            menu=(),
            **OPTIONS,
        )


def test_search_when_the_menu_names_what_the_backend_lacks_then_refused():
    data = batches(1)
    with pytest.raises(ConfigError, match="no_such_recipe"):
        pq.tune(
            transformer(),
            (data[0],),
            calibration_data=data,
            target=0.9,
            menu=["no_such_recipe"],
            **OPTIONS,
        )


def in_microseconds(products):
    """A stopwatch's `measure`: what a call takes is what the schemes of its products take."""

    def measure(self, gm, groups=()):
        times = {name: 1.0 for name in groups}
        for node in gm.graph.nodes:
            if is_product(node):
                times[origin_name(node)] = products[is_dequantize(node.args[1])]
        return Latency(call_us=100.0 + sum(times.values()), groups=times)

    return measure


def test_search_when_given_microseconds_then_the_best_mix_that_is_measured_within_them(monkeypatch):
    monkeypatch.setattr(Stopwatch, "measure", in_microseconds({True: 10.0, False: 30.0}))
    data = batches(1)
    options = {**OPTIONS, "recipe": POOR, "menu": ()}
    found = pq.tune(
        transformer(), (data[0],), calibration_data=data, budget={"latency_us": 275}, **options
    )
    assert found.latency_us == 270  # two of 13 products in float
    assert "blocks.1.up" in {c.module for c in found.choices if c.scheme == "float"}
    assert [point.latency_us for point in found.front] == [230, 270]
    assert '"latency_us": 270' in found.to_json()
    with pytest.raises(ConfigError, match="the fastest measured takes 230 us"):
        pq.tune(
            transformer(), (data[0],), calibration_data=data, budget={"latency_us": 200}, **options
        )
    with pytest.raises(UnsupportedError, match="a smaller budget"):
        pq.tune(
            transformer(), (data[0],), calibration_data=data, budget={"latency_us": 999}, **options
        )


def test_search_when_the_menu_has_an_algorithm_then_one_group_gets_it_and_stays_int8(tmp_path):
    data = batches(1)
    model = transformer()
    menu = ["int8@mse", "int8+smooth_quant"]
    given = {"calibration_data": data, "backend": "onnx", "progress": False}
    found = pq.tune(model, (data[0],), recipe=POOR, target=0.9995, menu=menu, points=0, **given)
    assert found.share_quantized == 1.0
    changed = {choice.module: choice.scheme for choice in found.choices if choice.scheme != "int8"}
    assert changed == {"blocks.1.up": "int8+smooth_quant"}
    found.recipe.save(tmp_path / "mixed.toml")
    again = pq.quantize(model, (data[0],), recipe=str(tmp_path / "mixed.toml"), **given)
    assert torch.equal(again.run(data[0]), found.artifact.run(data[0]))


def measured_by_share(self, gm):
    """A `measure` of a bench: the more is quantized the better."""
    return 0.5 if gm is None else share_quantized(gm)


def test_search_when_a_mix_of_fewer_bytes_measures_better_then_it_is_returned(monkeypatch):
    monkeypatch.setattr(Bench, "measure", measured_by_share)
    data = batches(1)
    options = {**OPTIONS, "points": 2, "recipe": POOR, "menu": ()}
    found = pq.tune(
        transformer(), (data[0],), calibration_data=data, budget={"bytes": 60_000}, **options
    )
    assert found.metric == max(point.metric for point in found.measured) == 1.0
    assert found.recipe in [point.recipe for point in found.front]


def test_search_when_the_noise_of_the_recipe_is_far_above_the_first_guess_then_it_may_stay(
    monkeypatch,
):
    monkeypatch.setattr(search_mixes, "_FIRST_NOISE", 1e-12)
    data = [(x, x) for x in batches(1)]
    found = pq.tune(
        transformer(),
        (data[0][0],),
        calibration_data=data,
        accuracy_drop=0.5,
        metric=lambda outputs, _: float(outputs.isfinite().float().mean()),
        menu=(),
        **OPTIONS,
    )
    assert found.recipe.rules == ()
    assert [point.recipe for point in found.front] == [found.recipe]
