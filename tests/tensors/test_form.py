import pytest
import torch

from pt2e_quant.core.errors import ConfigError
from pt2e_quant.core.formats.format_schemes import FORMAT_SCHEMES
from pt2e_quant.core.scheme_names import scheme_named
from pt2e_quant.tensors.form import TensorForm, form_from_text, form_to_text

NAMES = (*FORMAT_SCHEMES, "w4_g32", "a8w4_g32", "int8_dynamic", "w3")


@pytest.mark.parametrize("name", NAMES)
def test_form_when_written_as_text_then_reads_back_equal(name):
    scheme = scheme_named(name)
    form = TensorForm(
        scheme=scheme.weight,
        dtype=torch.bfloat16,
        shape=(8, 128),
        axes=(1, 0),
        layout="packed",
        input=scheme.input,
    )
    assert form_from_text(form_to_text(form)) == form


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"scheme": 3}'])
def test_form_when_text_is_none_of_its_then_refused(text):
    with pytest.raises(ConfigError, match="no description of a quantized tensor"):
        form_from_text(text)


def test_form_when_axes_are_turned_then_shape_and_strides_follow():
    form = TensorForm(
        scheme=scheme_named("w8").weight, dtype=torch.float32, shape=(2, 3, 4), axes=(2, 0, 1)
    )
    like = torch.empty(2, 3, 4).permute(2, 0, 1)
    assert form.seen_shape == tuple(like.shape)
    assert form.seen_strides == like.stride()
    assert not form.is_upright
