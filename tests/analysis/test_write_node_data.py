import json
import math

import pytest

import pt2e_quant as pq
from pt2e_quant.core.errors import ArtifactError, ConfigError


def test_write_node_data_when_decibels_then_low_ones_are_red(tmp_path):
    path = tmp_path / "nodes.json"
    pq.write_node_data(path, {"conv2d": 12.0, "relu": math.inf, "linear": 40.0}, name="own SQNR")
    found = json.loads(path.read_text())
    assert found["name"] == "own SQNR"
    assert found["results"] == {"conv2d": {"value": 12.0}, "linear": {"value": 40.0}}
    assert [item["stop"] for item in found["gradient"]] == [0.0, 0.5, 1.0]
    pq.write_node_data(path, {"a": 1.0}, name="us", low_is_bad=False)
    turned = json.loads(path.read_text())["gradient"]
    assert turned[0]["bgColor"] == found["gradient"][2]["bgColor"]


def test_write_node_data_when_there_is_nothing_or_nowhere_then_says_so(tmp_path):
    with pytest.raises(ConfigError, match="no figure"):
        pq.write_node_data(tmp_path / "a.json", {"x": math.nan}, name="dB")
    with pytest.raises(ArtifactError, match="cannot write"):
        pq.write_node_data(tmp_path / "no" / "a.json", {"x": 1.0}, name="dB")
