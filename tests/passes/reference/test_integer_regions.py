"""What training computes in integers: found in prepared graphs, written as text, read again."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import pt2e_quant as pq
from pt2e_quant.core.integer_ops.calls import out_dtype
from pt2e_quant.core.integer_ops.profiles import PROFILES
from pt2e_quant.passes.reference.forms.moves import BOOLEANS, INTEGERS
from pt2e_quant.passes.reference.forms.registry import FORMS, REQUANTIZE
from pt2e_quant.passes.reference.integer_regions import (
    compute_exactly,
    find_regions,
    region_of,
    with_arithmetic,
)
from pt2e_quant.passes.reference.reference_template import reference_template

aten = torch.ops.aten


def prepared_of(model, x):
    ep = torch.export.export(model.eval(), (x,))
    return pq.prepare_qat_pt2e(ep, pq.backends.get("xnnpack").quantizer("int8"))


def test_forms_when_named_then_each_name_is_of_one():
    names = [form.name for form in (*FORMS, REQUANTIZE, BOOLEANS, INTEGERS)]
    assert len(set(names)) == len(names)


def test_template_when_written_then_fake_quantizes_are_qdq():
    gm = prepared_of(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)), torch.zeros(4, 6))
    template = reference_template(gm)
    shown = [
        n.name if n.op == "call_function" else n.op
        for n in template.gm.graph.nodes
        if n.op in ("call_function", "placeholder", "output")
    ]
    assert [name.rstrip("_0123456789") for name in shown] == [
        "placeholder", "quantize_per_tensor_default",
        "dequantize_per_tensor_default", "dequantize_per_channel_default", "linear", "relu",
        "quantize_per_tensor_default",
        "dequantize_per_tensor_default", "dequantize_per_channel_default", "linear",
        "quantize_per_tensor_default",
        "dequantize_per_tensor_default", "output",
    ]  # fmt: skip
    assert sorted(t.observer for t in template.tensors.values()) == [
        f"activation_post_process_{i}" for i in range(5)
    ]


@pytest.mark.parametrize("profile", PROFILES.values(), ids=list(PROFILES))
def test_region_when_given_a_profile_then_it_reads_the_same_profile(profile):
    gm = prepared_of(nn.Linear(6, 3), torch.zeros(4, 6))
    quantization, found = find_regions(reference_template(gm))
    assert (quantization.name, quantization.has_form) == ("activation_post_process_0", False)
    assert (found.name, found.has_form) == ("linear", True)
    assert found.inputs[-1].endswith("bias")
    assert region_of(found.text).arithmetic.profile == PROFILES["default"]
    assert region_of(with_arithmetic(found.text, profile)).arithmetic.profile == profile


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**16),
    inner=st.sampled_from([1, 9, 700, 5000]),
    reach=st.sampled_from([1, 127, 255, 256, 257, 40_000]),
)
def test_products_when_by_float_kernels_then_equal_to_integers(seed, inner, reach):
    draw = torch.Generator().manual_seed(seed)
    x = torch.randint(-reach, reach + 1, (3, inner), generator=draw, dtype=torch.int32)
    w = torch.randint(-127, 128, (4, inner), generator=draw, dtype=torch.int32)
    # The greatest sums there are, and cancellation in them.
    x[0], w[0] = reach, 127
    w[1, ::2] = -127
    found = compute_exactly(out_dtype, aten.linear.default, torch.int64, x, w, None)
    assert torch.equal(found, x.long() @ w.long().T)


@settings(max_examples=20)
@given(
    seed=st.integers(0, 2**16), groups=st.sampled_from([1, 2]), channels=st.sampled_from([2, 256])
)
def test_convolutions_when_by_float_kernels_then_equal_to_integers(seed, groups, channels):
    draw = torch.Generator().manual_seed(seed)
    x = torch.randint(-255, 256, (1, channels, 5, 5), generator=draw, dtype=torch.int32)
    shape = (4, channels // groups, 3, 3)
    w = torch.randint(-127, 128, shape, generator=draw, dtype=torch.int32)
    x[:, :, 2], w[0] = 255, 127
    rest = (None, [1, 1], [1, 1], [1, 1], False, [0, 0], groups)
    found = compute_exactly(out_dtype, aten.convolution.default, torch.int32, x, w, *rest)
    assert torch.equal(found, aten.convolution.default(x.double(), w.double(), *rest).int())
