"""Affine observers and fake-quantize against torchao's: equal to the last bit."""

import pytest
import torch

from pt2e_quant.core.errors import ConfigError, UnsupportedError
from pt2e_quant.core.granularity import PerAxis, PerBlock, PerGroup, PerRow, PerTensor, PerToken
from pt2e_quant.observers.static.minmax import MinMaxObserver
from pt2e_quant.pt2e import fake_quantize as defaults
from pt2e_quant.pt2e.fake_quantize import AffineFakeQuantize
from pt2e_quant.pt2e.observers import affine
from pt2e_quant.pt2e.observers.affine import AffineQuantizedMinMaxObserver
from pt2e_quant.pt2e.observers.affine_qparams import MappingType, TorchAODType, ZeroPointDomain

torchao = pytest.importorskip("torchao.quantization")
theirs = pytest.importorskip("torchao.quantization.pt2e._affine_quantization")
their_fake = pytest.importorskip("torchao.quantization.pt2e.fake_quantize")

GRANULARITIES = [PerTensor(), PerAxis(1), PerGroup(4), PerRow(0), PerToken(), PerBlock((2, 4))]
MAPPINGS = [
    {"mapping_type": "SYMMETRIC"},
    {"mapping_type": "SYMMETRIC_NO_CLIPPING_ERR"},
    {"mapping_type": "ASYMMETRIC"},
    {"mapping_type": "ASYMMETRIC", "preserve_zero": False, "zero_point_domain": "FLOAT"},
    {"mapping_type": "SYMMETRIC", "quant_min": -7, "quant_max": 7, "eps": 0.25},
]


def read(kwargs, mapping, domain):
    kwargs = {**kwargs, "mapping_type": getattr(mapping, kwargs["mapping_type"])}
    if "zero_point_domain" in kwargs:
        kwargs["zero_point_domain"] = getattr(domain, kwargs["zero_point_domain"])
    return kwargs


def pair(kind, kwargs, granularity, wrap=None):
    their_granularity = getattr(torchao, type(granularity).__name__.replace("Channel", "Axis"))
    fields = [getattr(granularity, f) for f in type(granularity).__dataclass_fields__]
    if isinstance(granularity, PerGroup):
        fields = fields[:1]
    ours = read(kwargs, MappingType, ZeroPointDomain)
    other = read(kwargs, torchao.MappingType, torchao.ZeroPointDomain)
    common = {"target_dtype": torch.int8}
    their_kind = getattr(theirs, kind)
    return (
        getattr(affine, kind)(**ours, **common, granularity=granularity),
        their_kind(**other, **common, granularity=their_granularity(*fields)),
        # Their granularity and enums under our observer.
        getattr(affine, kind)(**other, **common, granularity=their_granularity(*fields)),
    )


def batches():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(4, 8, generator=generator) + 0.3 for _ in range(3)]


@pytest.mark.parametrize(
    "kind", ["AffineQuantizedMinMaxObserver", "AffineQuantizedMovingAverageMinMaxObserver"]
)
@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
@pytest.mark.parametrize("kwargs", MAPPINGS, ids=str)
def test_qparams_when_observed_then_equal_to_torchao(kind, granularity, kwargs):
    observers = pair(kind, kwargs, granularity)
    for batch in batches():
        for observer in observers:
            assert observer(batch) is batch
    ours, other, mixed = (observer.calculate_qparams() for observer in observers)
    for a, b, c in zip(ours, other, mixed, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)
        assert torch.equal(c, b)
    assert observers[0].block_size == tuple(observers[1].block_size)


@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
@pytest.mark.parametrize("kwargs", [MAPPINGS[0], MAPPINGS[2], MAPPINGS[3], MAPPINGS[4]], ids=str)
def test_fake_quantize_when_trained_then_equal_to_torchao(granularity, kwargs):
    ours_observer, other_observer, _ = pair("AffineQuantizedMinMaxObserver", kwargs, granularity)
    ours = AffineFakeQuantize(lambda **_: ours_observer)
    other = their_fake.AffineFakeQuantize(lambda **_: other_observer)
    for batch in batches():
        x, y = batch.clone().requires_grad_(), batch.clone().requires_grad_()
        a, b = ours(x), other(y)
        assert torch.equal(a, b)
        a.square().sum().backward()
        b.square().sum().backward()
        assert torch.equal(x.grad, y.grad)
    ours.disable_observer()
    other.disable_observer()
    assert torch.equal(ours(batches()[0] * 5), other(batches()[0] * 5))


@pytest.mark.parametrize(
    "name", ["default_affine_fake_quant", "default_affine_per_axis_fake_quant"]
)
def test_default_when_used_then_equal_to_torchao(name):
    ours, other = getattr(defaults, name)(), getattr(their_fake, name)()
    x = batches()[0]
    assert torch.equal(ours(x), other(x))


def test_group_default_when_used_then_one_scale_for_128():
    ours = defaults.default_groupwise_fake_quant()
    ours(torch.randn(2, 256))
    assert ours.scale.numel() == 4


def test_zero_point_when_the_domain_is_none_then_there_is_none():
    made = AffineFakeQuantize(
        mapping_type=MappingType.ASYMMETRIC,
        target_dtype=torch.int8,
        granularity=PerTensor(),
        zero_point_domain=ZeroPointDomain.NONE,
    )
    x = torch.tensor([[0.0, 2.55]])
    made(x)
    assert made.calculate_qparams()[1] is None


def test_observer_when_it_saw_nothing_then_qparams_are_refused():
    made = AffineQuantizedMinMaxObserver(MappingType.SYMMETRIC, torch.int8, PerTensor())
    assert not made.seen
    with pytest.raises(UnsupportedError, match="saw no data"):
        made.calculate_qparams()


def test_state_when_saved_then_a_fresh_observer_takes_it():
    made, fresh = (
        AffineQuantizedMinMaxObserver(MappingType.SYMMETRIC, torch.int8, PerRow()) for _ in range(2)
    )
    assert not made.state_dict()
    made(batches()[0])
    fresh.load_state_dict(made.state_dict())
    assert torch.equal(fresh.calculate_qparams()[0], made.calculate_qparams()[0])


def test_arguments_when_wrong_then_refused():
    with pytest.raises(ConfigError, match="granularity"):
        AffineQuantizedMinMaxObserver(MappingType.SYMMETRIC, torch.int8, None)
    with pytest.raises(ConfigError, match="affine observer"):
        AffineFakeQuantize(MinMaxObserver)
    made = AffineQuantizedMinMaxObserver(MappingType.SYMMETRIC, torch.int8, "per tensor")
    with pytest.raises(ConfigError, match="no granularity"):
        made(torch.ones(1))


def test_names_when_listed_then_torchao_s():
    assert [t.name for t in TorchAODType] == [t.name for t in torchao.quant_primitives.TorchAODType]
    assert [t.name for t in MappingType] == [t.name for t in torchao.MappingType]
    assert [t.name for t in ZeroPointDomain] == [t.name for t in torchao.ZeroPointDomain]
