"""Lowering to ONNX without a decomposition where there is nothing to decompose: the same files."""

from collections import Counter
from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.onnx._internal.exporter import _decomp, _fx_passes
from torch.onnx._internal.exporter._registration import ONNXRegistry
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_flatten, tree_unflatten

import pt2e_quant as pq
from pt2e_quant.accelerate.onnx_decompositions import PATCH, without_idle_decompositions
from pt2e_quant.accelerate.patch import VARIABLE
from tests.digests.digest_artifact import digest_program, digest_results
from tests.mixture_of_experts import Mixture

pytestmark = pytest.mark.skipif(not PATCH.is_on(), reason="other versions: nothing is replaced")
ONNX = pq.backends.get("onnx").allowing_slower()


class Convs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 8, 3), nn.Linear(72, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.conv(x)).flatten(1))


class Heads(nn.Module):
    """Reshapes that need a copy and such that do not, copies, and results that are either."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (t.reshape(2, -1, 4, 4).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        y = (q @ k.transpose(-1, -2)).softmax(-1) @ v
        return y.transpose(1, 2).reshape(2, -1, 16), y.transpose(1, 2).contiguous(), q.flatten(2)


class Casts(nn.Module):
    """A cast is a composite that may be a view: torch's own decomposition writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x) * (x > 0).to(torch.float32)


TOKENS = Dim("tokens", max=30)
CASES = {
    "convolutions": (Convs(), (2, 3, 5, 5), None, "int8", True),
    "heads": (Heads(), (2, 9, 16), None, "int8_dynamic", True),
    "experts": (Mixture("turned"), (1, 9, 32), ({1: TOKENS},), "int8", True),
    "casts": (Casts(), (2, 8), None, "int8", False),
}


@pytest.mark.parametrize("name", CASES)
def test_without_idle_decompositions_when_switched_off_then_the_same_file(name, monkeypatch):
    model, sizes, shapes, recipe, is_skipped = CASES[name]
    x = torch.randn(sizes, generator=torch.Generator().manual_seed(0))
    program = torch.export.export(model.eval(), (x,), dynamic_shapes=shapes)
    prepared = pq.prepare_pt2e(program, ONNX.quantizer(recipe), effort="fast")
    canonical = pq.convert_pt2e(pq.calibrate(prepared, [x], progress=False))
    calls = []
    decompose = ExportedProgram.run_decompositions

    def counted(*args, **kwargs):
        calls.append(args)
        return decompose(*args, **kwargs)

    monkeypatch.setattr(ExportedProgram, "run_decompositions", counted)
    on = ONNX.lower(canonical, verify=False)
    assert not calls if is_skipped else len(calls) == 1
    monkeypatch.setenv(VARIABLE, PATCH.name)
    calls.clear()
    off = ONNX.lower(canonical, verify=False)
    assert len(calls) == 1
    assert digest_program(on) == digest_program(off)
    assert digest_results(on.run(x)) == digest_results(off.run(x))


class Call(nn.Module):
    """An operator's sample as a model of its tensors."""

    def __init__(self, operator) -> None:
        super().__init__()
        sample = next(iter(operator.sample_inputs("cpu", torch.float32)))
        self.call = operator.op
        self.values, self.spec = tree_flatten(((sample.input, *sample.args), sample.kwargs))
        self.inputs = tuple(v.detach() for v in self.values if isinstance(v, Tensor))

    def forward(self, *inputs: Tensor):
        given = iter(inputs)
        values = [next(given) if isinstance(v, Tensor) else v for v in self.values]
        args, kwargs = tree_unflatten(values, self.spec)
        return self.call(*args, **kwargs)


_VIEWS = ("view", "reshape", "flatten", "contiguous", "clone")
_NO_WORK = ("alias", "detach", "lift_fresh", "lift_fresh_copy")
_REWRITTEN = {getattr(torch.ops.aten, name) for name in (*_VIEWS, *_NO_WORK)}


@cache
def _tables() -> tuple[ONNXRegistry, dict]:
    registry = ONNXRegistry.from_torchlib()
    known = set(_decomp.get_onnx_implemented_overloads(registry))
    return registry, _decomp.create_onnx_friendly_decomposition_table(known)


def _operators(program: ExportedProgram) -> Counter:
    program.graph.eliminate_dead_code()
    calls = [n for n in program.graph.nodes if n.op == "call_function"]
    return Counter(
        str(n.target) for n in calls if getattr(n.target, "overloadpacket", None) not in _REWRITTEN
    )


@pytest.mark.parametrize("operator", op_db, ids=lambda o: f"{o.name}_{o.variant_test_name}")
def test_without_idle_decompositions_when_any_operator_then_those_of_tracing(operator, monkeypatch):
    if torch.float32 not in operator.dtypes:
        pytest.skip("not of floats")
    try:
        call = Call(operator)
        program, before = (torch.export.export(call, call.inputs) for _ in range(2))
    except Exception as error:
        pytest.skip(f"torch cannot export it: {type(error).__name__}")
    registry, table = _tables()
    with without_idle_decompositions(), monkeypatch.context() as patch:
        patch.setattr(ExportedProgram, "run_decompositions", lambda *_: None)
        written = _fx_passes.decompose_with_registry(program, registry)
    if written is not None:
        assert _operators(written) == _operators(before.run_decompositions(dict(table)))
