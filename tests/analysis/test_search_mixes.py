import pytest

import pt2e_quant as pq
from pt2e_quant.core.errors import ConfigError, UnsupportedError
from tests.analysis.outlier_transformer import batches, transformer

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
