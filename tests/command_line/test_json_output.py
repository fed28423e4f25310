import json
import math

from pt2e_quant.command_line.json_output import as_json


def test_as_json_when_numbers_are_infinite_then_null():
    found = json.loads(as_json("bench", {"a": [math.inf, 1.5], "b": {"c": math.nan}}))
    assert found == {"schema": "pt2e-quant/bench/1", "a": [None, 1.5], "b": {"c": None}}
