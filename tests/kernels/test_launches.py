"""Launches on "cuda" without a GPU: every timed case up to the launch itself, and its peers.

Here the branches run that neither definitions nor the interpreter reach: tensors lie on a GPU, its
name, its processors and its capability are asked for.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from benchmarks.kernels.catalog import BENCHES, COMPILE_CASES
from pt2e_quant.core.errors import MissingExtraError, UnsupportedError
from pt2e_quant.kernels import fused_op, tiles
from pt2e_quant.kernels.epilogue.epilogue import Activation
from tests.fake_cuda import CUDA, H200, FakeGpu, fake_cuda

OPTIONS = {"num_warps", "num_stages", "enable_fp_fusion"}
by_unit = pytest.mark.parametrize("bench", BENCHES, ids=lambda bench: bench.name)


@dataclass
class Launched:
    """What Triton was asked to launch."""

    calls: list[tuple[Any, tuple[int, ...], dict[str, Any]]] = field(default_factory=list)

    def run(self, kernel, grid, given):
        self.calls.append((kernel, grid, given))


@pytest.fixture
def launched(monkeypatch) -> Iterator[Launched]:
    """Triton's launcher, which notes what it was given."""
    jit = pytest.importorskip("triton.runtime.jit")
    found = Launched()

    def run(self, *args, grid, warmup, **given):
        assert not args
        found.run(self, grid, given)

    monkeypatch.setattr(jit.JITFunction, "run", run)
    tiles._device_name.cache_clear()
    yield found
    tiles._device_name.cache_clear()


def off_device(tree):
    leaves = pytree.tree_leaves(tree)
    return [t.device for t in leaves if isinstance(t, torch.Tensor) and t.device != CUDA]


@by_unit
def test_cases_when_called_then_launch_with_all_arguments_on_the_device(bench, launched):
    for case in bench.cases:
        launched.calls.clear()
        with fake_cuda():
            operands = case.make(CUDA, 0)
            made = bench.call(operands, None)
        assert not off_device((operands, made)), case.name
        for kernel, grid, given in launched.calls:
            assert set(given) - OPTIONS == set(kernel.arg_names), case.name
            assert not off_device(given), case.name
            assert all(type(size) is int and size > 0 for size in grid), case.name
        # fp8 products that cuBLAS has are torch._scaled_mm.
        assert launched.calls or bench.op == "fp8_linear", case.name


@by_unit
def test_peers_when_prepared_then_take_the_operands_and_give_results_on_the_device(bench):
    for case in bench.cases:
        for name, peer in case.peers.items():
            with fake_cuda():
                made = peer.prepare(case.make(CUDA, 0))()
            assert pytree.tree_leaves(made), (case.name, name)
            assert not off_device(made), (case.name, name)


@by_unit
def test_bench_when_the_gpu_is_too_old_then_refuses_before_the_launch(bench, launched):
    older = FakeGpu("NVIDIA T4", 7, 5) if bench.lowest_capability == 80 else FakeGpu("A100", 8, 0)
    with fake_cuda(older), pytest.raises(UnsupportedError, match=f"found {older.name}") as caught:
        bench.call(bench.cases[0].make(CUDA, 0), None)
    assert "fix" in str(caught.value)
    assert not launched.calls


@by_unit
def test_bench_when_triton_is_missing_then_names_the_extra(bench, monkeypatch):
    monkeypatch.setattr(fused_op, "find_spec", lambda name: None)
    with fake_cuda(), pytest.raises(MissingExtraError, match=r"pip install 'pt2e-quant\[cuda\]'"):
        bench.call(bench.cases[0].make(CUDA, 0), None)


class HopperDriver:
    """A device that kernels are compiled for, and that nothing is loaded on."""

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)


@pytest.mark.slow  # compiles a hundred kernels
@by_unit
def test_launches_when_specialised_by_triton_itself_then_compile(
    bench, launched, monkeypatch, tmp_path
):
    """Sizes that divide by 16, ones, integers of 64 bits: what a compile case only says."""
    jit = pytest.importorskip("triton.runtime.jit")
    driver = pytest.importorskip("triton.runtime").driver
    for case in bench.cases:
        with fake_cuda():
            bench.call(case.make(CUDA, 0), None)
    monkeypatch.undo()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(driver, "_active", HopperDriver())
    for kernel, grid, given in launched.calls:
        plain = {
            name: jit.MockTensor(v.dtype, list(v.shape)) if isinstance(v, torch.Tensor) else v
            for name, v in given.items()
        }
        assert kernel.run(grid=grid, warmup=True, **plain).asm["cubin"]


def test_tiles_when_the_device_has_a_table_then_they_are_read_from_it(launched, monkeypatch):
    (bench,) = (bench for bench in BENCHES if bench.name == "int8_linear")
    default = tiles.read_tiles("int8_linear")["large"]
    mine = tiles.TileConfig(default.blocks, num_warps=16, num_stages=2)
    assert mine != default
    tables = {tiles.DEFAULT: tiles.read_tiles("int8_linear"), "nvidia_h200": {"large": mine}}
    monkeypatch.setattr(tiles, "read_tiles", lambda op, slug=tiles.DEFAULT: tables[slug])
    with fake_cuda(H200):
        bench.call(bench.cases[0].make(CUDA, 0), None)
    ((_, _, given),) = launched.calls
    assert (given["num_warps"], given["num_stages"]) == (16, 2)


def test_benches_when_all_are_called_then_every_kernel_has_a_timed_case(launched):
    for bench in BENCHES:
        for case in bench.cases:
            with fake_cuda():
                bench.call(case.make(CUDA, 0), None)
    timed = {kernel.fn.__name__ for kernel, _, _ in launched.calls}
    assert {case.kernel for case in COMPILE_CASES} <= timed


def test_bench_draws_when_many_are_made_then_reach_every_function_and_layout():
    (bench,) = (bench for bench in BENCHES if bench.name == "quantize")
    drawn = [bench.draw(torch.device("cpu"), seed) for seed in range(20)]
    assert {operands.activation for operands in drawn} == {str(a) for a in Activation}
    (bench,) = (bench for bench in BENCHES if bench.name == "int8_linear")
    drawn = [bench.draw(torch.device("cpu"), seed) for seed in range(20)]
    residuals = {None if o.residual is None else o.residual.dtype for o in drawn}
    assert residuals == {None, torch.bfloat16, torch.int8}
    assert {operands.bias is None for operands in drawn} == {True, False}
    (bench,) = (bench for bench in BENCHES if bench.name == "quantize, pixels")
    drawn = [bench.draw(torch.device("cpu"), seed) for seed in range(20)]
    assert {image.is_contiguous() for image in drawn if image.shape[1] > 1} == {True, False}
    (bench,) = (bench for bench in BENCHES if bench.name == "norm_quantize")
    drawn = [bench.draw(torch.device("cpu"), seed) for seed in range(4)]
    assert {operands.is_per_token for operands in drawn} == {True, False}
