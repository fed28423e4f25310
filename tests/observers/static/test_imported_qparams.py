import torch

from pt2e_quant.observers.static.fixed import ImportedQParams


def made(**options):
    scale, zero_point = torch.tensor([0.5, 2.0]), torch.tensor([3, -1], dtype=torch.int32)
    return ImportedQParams(
        scale,
        zero_point,
        dtype=torch.int8,
        qscheme=torch.per_channel_affine,
        quant_min=-128,
        quant_max=127,
        **options,
    )


def test_qparams_when_data_is_shown_then_those_of_the_file():
    observer = made(ch_axis=1)
    assert observer.seen
    x = torch.randn(4, 2)
    assert observer(x) is x
    scale, zero_point = observer.calculate_qparams()
    assert (scale.tolist(), zero_point.tolist()) == ([0.5, 2.0], [3, -1])
    assert (observer.ch_axis, observer.group_size) == (1, None)


def test_state_when_loaded_then_the_qparams_of_the_other():
    observer, other = made(), made()
    other.scale.fill_(9)
    observer.load_state_dict(other.state_dict())
    assert observer.calculate_qparams()[0].tolist() == [9, 9]
