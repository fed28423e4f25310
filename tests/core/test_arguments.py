import numpy as np
import pytest
import torch

from pt2e_quant.core.arguments import check_filter, check_number, check_tensor, takes_call
from pt2e_quant.core.errors import ConfigError


@pytest.mark.parametrize("value", [0, 1.5, np.float32(2.0), torch.tensor(0.25), torch.ones(1)])
def test_number_when_it_is_one_of_any_kind_then_is_taken(value: object):
    check_number("lr", value, least=0)


@pytest.mark.parametrize("value", ["1", None, True, float("nan"), float("inf"), -1, torch.ones(2)])
def test_number_when_it_is_none_then_says_what_was_found(value: object):
    with pytest.raises(ConfigError, match="lr is a number of at least 0, found"):
        check_number("lr", value, least=0)


def test_whole_number_when_it_has_a_fraction_then_is_refused():
    check_number("every", np.int64(2), least=1, is_whole=True)
    with pytest.raises(ConfigError, match=r"every is a whole number of at least 1, found 1\.5"):
        check_number("every", 1.5, least=1, is_whole=True)


class Wanted:
    def __call__(self, module: object, path: str, *rest: object) -> bool:
        return True


def test_filter_when_it_takes_two_arguments_in_any_way_then_is_taken():
    for wanted in (None, Wanted(), lambda *both: True, lambda m, p, more=3: True, max):
        check_filter(wanted)
    assert not takes_call(lambda module: True, 2)


def test_tensor_when_it_holds_integers_then_is_refused_unless_any_will_do():
    check_tensor("x", torch.ones(2, dtype=torch.int8), is_real=False)
    with pytest.raises(ConfigError, match=r"x is a tensor of real numbers.*found torch\.int8"):
        check_tensor("x", torch.ones(2, dtype=torch.int8))
