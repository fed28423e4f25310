import copy
import pickle

import pytest

from pt2e_quant.core.errors import ConfigError
from pt2e_quant.core.granularity import (
    PerBlock,
    PerChannel,
    PerGroup,
    PerRow,
    PerTensor,
    PerToken,
    block_size_of,
)
from pt2e_quant.pt2e.observers import affine_qparams


@pytest.mark.parametrize(
    ("granularity", "block"),
    [
        (PerTensor(), (4, 6, 8)),
        (PerChannel(1), (4, 1, 8)),
        (PerChannel(-1), (4, 6, 1)),
        (PerGroup(2), (1, 1, 2)),
        (PerGroup(3, axis=1), (1, 3, 1)),
        (PerToken(), (1, 1, 8)),
        (PerBlock((2, 3, 8)), (2, 3, 8)),
    ],
)
def test_block_when_shape_is_known_then_its_sizes_are_given(granularity, block):
    assert block_size_of(granularity, (4, 6, 8)) == block


@pytest.mark.parametrize(
    "granularity", [PerChannel(3), PerGroup(5), PerBlock((2, 3)), PerBlock((3, 3, 8))]
)
def test_block_when_it_does_not_fit_then_refuses(granularity):
    with pytest.raises(ConfigError, match=r"out of range|does not divide"):
        block_size_of(granularity, (4, 6, 8))


def test_constructor_when_length_is_not_positive_then_refuses():
    with pytest.raises(ConfigError, match="group_size"):
        PerGroup(0)
    with pytest.raises(ConfigError, match="block_size"):
        PerBlock((2, 0))


def test_block_when_an_axis_is_empty_then_of_one_channel():
    assert block_size_of(PerChannel(0), (0, 3)) == (1, 3)


GRANULARITIES = (PerTensor(), PerChannel(1), PerGroup(32), PerToken(), PerBlock((1, 32)), PerRow())


@pytest.mark.parametrize("granularity", GRANULARITIES, ids=repr)
def test_granularity_when_torchao_is_loaded_then_an_instance_of_its_class(granularity):
    theirs = pytest.importorskip("torchao.quantization.granularity")
    name = type(granularity).__name__.replace("PerChannel", "PerAxis")
    assert isinstance(granularity, getattr(theirs, name))
    assert isinstance(granularity, theirs.Granularity)
    assert isinstance(granularity, type(granularity))
    assert repr(granularity).startswith(type(granularity).__name__)


@pytest.mark.parametrize("granularity", GRANULARITIES, ids=repr)
def test_granularity_when_copied_then_equal_and_of_its_own_type(granularity):
    pytest.importorskip("torchao.quantization.granularity")
    for made in (copy.deepcopy(granularity), pickle.loads(pickle.dumps(granularity))):
        assert type(made) is type(granularity)
        assert made == granularity
        assert hash(made) == hash(granularity)
    assert len(set(GRANULARITIES)) == len(GRANULARITIES)
    assert PerGroup(32) != PerGroup(16)


@pytest.mark.parametrize("name", ["MappingType", "ZeroPointDomain"])
def test_enum_when_compared_with_torchaos_then_equal_by_name(name):
    theirs = getattr(pytest.importorskip("torchao.quantization.quant_primitives"), name)
    ours = getattr(affine_qparams, name)
    for member in ours:
        assert member == theirs[member.name]
        assert hash(member) == hash(theirs[member.name])
        assert [other for other in theirs if other == member] == [theirs[member.name]]
    assert ours.__members__.keys() == theirs.__members__.keys()
