"""Products of integers by float kernels are those of torch's integer kernels."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._C import DispatchKey
from torch._higher_order_ops.out_dtype import out_dtype, out_dtype_dense
from torch._subclasses import FakeTensor, FakeTensorMode

import pt2e_quant as pq
from pt2e_quant.accelerate import exact_products
from pt2e_quant.accelerate.exact_products import exact_product, install, sums_rows
from pt2e_quant.accelerate.patch import VARIABLE

aten = torch.ops.aten


def integers(seed, reach, *shape):
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(-reach, reach + 1, shape, generator=draw, dtype=torch.int16)


@settings(max_examples=30)
@given(
    seed=st.integers(0, 2**16),
    groups=st.sampled_from([1, 4]),
    channels=st.sampled_from([4, 64]),
    kernel=st.sampled_from([1, 3]),
    reach=st.sampled_from([127, 255, 256]),
)
def test_convolution_when_by_float_kernels_then_equal_to_the_integer_kernel(
    seed, groups, channels, kernel, reach
):
    x = integers(seed, reach, 2, channels, 6, 5)
    w = integers(seed + 1, 127, 8, channels // groups, kernel, kernel)
    x[0], w[0] = reach, 127  # the greatest sums there are
    rest = (None, [2, 1], [1, 0], [1, 1], False, [0, 0], groups)
    found = exact_product(aten.convolution.default, torch.int32, x, w, *rest)
    assert found is not None
    assert torch.equal(found, out_dtype_dense(aten.convolution.default, torch.int32, x, w, *rest))


@pytest.mark.parametrize(
    ("inner", "reach", "is_exact"),
    [(500, 255, True), (8000, 255, True), (9000, 255, False), (4, 257, False), (4, 40_000, False)],
)
def test_linear_when_float32_may_not_hold_a_sum_then_left_to_torch(inner, reach, is_exact):
    x = torch.full((3, inner), reach, dtype=torch.int32)
    w = torch.full((2, inner), 127, dtype=torch.int32)
    found = exact_product(aten.linear.default, torch.int32, x, w, None)
    assert (found is not None) is is_exact
    assert found is None or torch.equal(found, (x.long() @ w.long().T).int())


def test_product_when_a_kernel_may_round_then_left_to_torch(monkeypatch):
    x, w = integers(0, 255, 2, 3, 4, 4), integers(1, 127, 2, 3, 3, 3)
    rest = (None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    call = (aten.convolution.default, torch.int32, x, w, *rest)
    with torch.autocast("cpu", torch.bfloat16):
        assert exact_product(*call) is None
    with monkeypatch.context() as patch:
        patch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
        assert exact_product(*call) is None
    with monkeypatch.context() as patch:
        patch.setattr(exact_products.platform, "machine", lambda: "aarch64")
        assert exact_product(*call) is None
    assert exact_product(*call) is not None


def test_sums_rows_when_transposed_or_with_a_bias_then_false():
    window = ([1, 1], [0, 0], [1, 1])
    assert not sums_rows(aten.convolution.default, 0, 0, None, *window, True, [0, 0], 1)
    assert not sums_rows(aten.linear.default, 0, 0, torch.ones(1))
    assert not sums_rows(aten.mm.default, 0, 0)


def test_install_when_the_patch_is_off_then_the_reference_is_the_same(monkeypatch):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, groups=1), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=8))
    x = torch.randn(2, 3, 8, 8)
    program = torch.export.export(model.eval(), (x,))
    prepared = pq.prepare_pt2e(program, pq.IntegerQuantizer(), int_only=True)
    quantized = pq.convert_pt2e(pq.calibrate(prepared, [x], progress=False))
    called = []
    plain = exact_products.exact_product
    monkeypatch.setattr(
        exact_products, "exact_product", lambda *args: called.append(args) or plain(*args)
    )
    reference = pq.integer_reference(quantized)
    install()  # once more: nothing happens
    assert DispatchKey.CPU in out_dtype.py_kernels
    patched = reference(x)
    assert len(called) == 2
    monkeypatch.setenv(VARIABLE, exact_products.PATCH.name)
    assert torch.equal(reference(x), patched)
    assert len(called) == 2


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    "other", [(2, 3, 4, 5), (1, 3, 1, 1), (3, 2, 3, 4, 5), (7, 2, 1, 1, 5), None]
)
def test_mul_when_patched_then_equal_to_torch(dtype, other):
    install()
    left = integers(0, 255, 2, 3, 4, 5)
    right = 987_654_321 if other is None else integers(1, 255, *other)
    found = out_dtype(aten.mul.Tensor, dtype, left, right)
    assert found.dtype is dtype
    assert torch.equal(found, out_dtype_dense(aten.mul.Tensor, dtype, left, right))
    assert torch.equal(left, integers(0, 255, 2, 3, 4, 5))


def test_out_dtype_when_installed_then_gradients_and_fake_tensors_are_torch_s(monkeypatch):
    install()
    called = []
    monkeypatch.setattr(exact_products, "_on_cpu", lambda *args: called.append(args))
    with FakeTensorMode():
        fake = out_dtype(aten.mul.Tensor, torch.int32, torch.ones(2, dtype=torch.int16), 3)
    assert isinstance(fake, FakeTensor)
    assert not called
    monkeypatch.undo()
    x = torch.ones(2, requires_grad=True)
    made = out_dtype(aten.mul.Tensor, torch.float32, x, 3.0)
    with pytest.raises(RuntimeError, match="Autograd not implemented for out_dtype"):
        made.sum().backward()
