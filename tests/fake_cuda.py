"""Tensors on "cuda" on a machine without a GPU: shapes, dtypes and devices, and nothing computed.

Fake tensors refuse what mixes devices and what an operator does not take, as far as torch knows it
without running it (`_int_mm`, `_scaled_mm`, `_weight_int4pack_mm` say much).
"""

import contextlib
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

__all__ = ["CUDA", "H200", "FakeGpu", "fake_cuda"]

CUDA = torch.device("cuda", 0)
aten = torch.ops.aten


class FakeGpu(SimpleNamespace):
    """What torch.cuda says of a device; the attributes that torch has, and those alone."""

    def __init__(self, name="NVIDIA H200", major=9, minor=0):
        super().__init__(
            name=name,
            major=major,
            minor=minor,
            multi_processor_count=132,
            total_memory=141 * 10**9,
            L2_cache_size=60 * 2**20,
            uuid="1b2c3d4e-0000-1111-2222-333344445555",
        )


H200 = FakeGpu()


class _Generator(torch.Generator):
    """A generator for any device; fake tensors draw nothing from it."""

    def __new__(cls, device="cpu"):
        return super().__new__(cls, "cpu")


def _taken(tensor, key):
    """tensor[key] by operators."""
    keys = list(key) if isinstance(key, tuple) else [key]
    if Ellipsis in [k for k in keys if not isinstance(k, torch.Tensor)]:
        place = keys.index(Ellipsis)
        named = sum(k is not None and k is not Ellipsis for k in keys)
        keys[place : place + 1] = [slice(None)] * (tensor.dim() - named)
    axis = 0
    for k in keys:
        if k is None:
            tensor = tensor.unsqueeze(axis)
        elif isinstance(k, slice):
            tensor = aten.slice.Tensor(tensor, axis, k.start, k.stop, k.step or 1)
        elif isinstance(k, torch.Tensor):
            tensor = aten.index.Tensor(tensor, [None] * axis + [k])
        else:
            tensor = tensor.select(axis, int(k))
            axis -= 1
        axis += 1
    return tensor


def _put(tensor, key, value):
    """tensor[key] = value."""
    aten.copy_.default(_taken(tensor, key), value)


def _contiguous(tensor, memory_format=torch.contiguous_format):
    if tensor.is_contiguous(memory_format=memory_format):
        return tensor
    return aten.clone.default(tensor, memory_format=memory_format)


_BY_OPERATORS = {
    torch.Tensor.__getitem__: _taken,
    torch.Tensor.__setitem__: _put,
    torch.Tensor.__int__: lambda tensor: 0,  # what a check of values reads
    torch.Tensor.contiguous: _contiguous,
    torch.Tensor.copy_: aten.copy_.default,
}


class _WithoutADriver(TorchFunctionMode):
    """Methods that a build of torch without CUDA looks a device up for, by operators."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in _BY_OPERATORS and args[0].device.type == "cuda":
            func = _BY_OPERATORS[func]
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def fake_cuda(gpu=H200):
    """Within it `torch.device("cuda")` has tensors; compiled functions run as they were written.

    Args:
        gpu: what torch.cuda says is there.
    """
    with pytest.MonkeyPatch.context() as patch, FakeTensorMode(), _WithoutADriver():
        patch.setattr(torch, "Generator", _Generator)
        patch.setattr(torch.cuda, "get_device_capability", lambda d=None: (gpu.major, gpu.minor))
        patch.setattr(torch.cuda, "get_device_name", lambda d=None: gpu.name)
        patch.setattr(torch.cuda, "get_device_properties", lambda d=None: gpu)
        patch.setattr(torch.cuda, "device", lambda d: contextlib.nullcontext())
        with torch.compiler.set_stance("force_eager"):
            yield
