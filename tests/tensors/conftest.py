import pytest

from pt2e_quant.tensors import register_kernel, unregister_kernel
from pt2e_quant.tensors.kernels.dispatch import KERNELS

_ARGUMENTS = ("name", "op", "layout", "formats", "granularities", "has_input", "device", "dtypes",
              "takes")  # fmt: skip


@pytest.fixture
def no_kernels():
    """Products run on real values, as exported graphs do: equal to the last bit."""
    kept = list(KERNELS)
    for kernel in kept:
        unregister_kernel(kernel.name)
    yield
    for kernel in kept:
        register_kernel(kernel.run, **{name: getattr(kernel, name) for name in _ARGUMENTS})
    assert kept == KERNELS
