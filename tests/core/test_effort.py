import pytest

from pt2e_quant.core.effort import Effort, effort_named
from pt2e_quant.core.errors import ConfigError


def test_effort_named_when_known_then_that_effort():
    assert [effort_named(effort) for effort in ("fast", "balanced", "best")] == [*Effort]


def test_effort_named_when_unknown_then_a_near_name_is_offered():
    with pytest.raises(ConfigError, match=r'no effort "bset".*best'):
        effort_named("bset")
