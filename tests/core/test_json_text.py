import json
import math

import pytest

from pt2e_quant.core.json_text import json_text


def test_json_text_when_numbers_are_not_finite_then_null():
    text = json_text({"a": (math.nan, {"b": -math.inf}), "c": 1.5})
    found = json.loads(text, parse_constant=lambda name: pytest.fail(name))
    assert found == {"a": [None, {"b": None}], "c": 1.5}
