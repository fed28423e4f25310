"""The models whose digests are recorded: zoo blocks, drawn models, small models, the guide."""

import importlib.util
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.export import Dim, ExportedProgram
from transformers import LlamaConfig, LlamaForCausalLM

import pt2e_quant as pq
from tests.small_models import MODELS
from tests.zoo.test_zoo import ZOO

__all__ = ["CASES", "GUIDE", "Call", "Case", "guide_blocks"]

HERE = Path(__file__).parent
GUIDE = HERE.parents[1] / "docs" / "guide.md"
Call = tuple[Sequence[Any], Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model with its data.

    Args:
        program: the exported model.
        data: the calibration batches; the first is also what it was exported with.
        calls: what its artifacts are run on, in order.
        has_linear: whether recipes without calibration quantize anything.
        own: a backend and recipe that it is recorded with besides those that its name picks.
    """

    program: ExportedProgram
    data: list[Call]
    calls: list[Call]
    has_linear: bool = False
    own: tuple[tuple[str, str], ...] = ()


def _case(
    model: nn.Module, data: list[Call], calls: list[Call], shapes: Any = None, **options: Any
) -> Case:
    has_linear = any(isinstance(m, nn.Linear) for m in model.modules())
    args, kwargs = data[0]
    program = torch.export.export(model, tuple(args), dict(kwargs), dynamic_shapes=shapes)
    return Case(program=program, data=data, calls=calls, has_linear=has_linear, **options)


def _block(name: str) -> Case:
    block = ZOO[name]
    torch.manual_seed(0)
    model = block.make().eval()
    size = Dim("size", max=block.largest)
    is_dynamic = any(dim is not None for dim in block.dynamic)
    shapes = tuple(None if dim is None else {dim: size} for dim in block.dynamic)
    sizes = (block.sizes[0], block.sizes[-1] if is_dynamic else block.sizes[0])
    data = [(block.inputs(sizes[0]), {}) for _ in range(3)]
    calls = [(block.inputs(size), {}) for size in sizes]
    return _case(model, data, calls, shapes if is_dynamic else None)


def _drawn(path: Path) -> Case:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dynamo looks a model's module up by its name
    spec.loader.exec_module(module)
    data = [module.batch(seed) for seed in range(3)]
    calls = [module.batch(100 + at, **sizes) for at, sizes in enumerate(module.SIZES[:2])]
    own = ((module.BACKEND, module.RECIPE),)
    return _case(module.model(), data, calls, module.DYNAMIC, own=own)


def _small(name: str) -> Case:
    torch.manual_seed(0)  # some biases are left to torch
    make, batches = MODELS[name]
    data: list[Call] = [(batch, {}) for batch in batches()]
    own = tuple((backend, "int8") for backend in ("xnnpack", "onnx", "cpu"))
    return _case(make(), data[:3], data[-1:], own=own)


def _cached_llama() -> Case:
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    torch.manual_seed(0)
    program = pq.export_causal_lm(LlamaForCausalLM(config).eval(), max_length=32)
    ids = torch.randint(0, 64, (1, 9))
    data: list[Call] = [((ids, torch.arange(9)), {})]
    calls = [*data, ((ids[:, :1], torch.tensor([9])), {})]
    own = tuple((backend, "int8_dynamic") for backend in ("xnnpack", "onnx", "cpu", "cuda"))
    return Case(program=program, data=data, calls=calls, has_linear=True, own=own)


def _cases() -> Iterator[tuple[str, Callable[[], Case]]]:
    yield from ((f"zoo {name}", partial(_block, name)) for name in sorted(ZOO))
    for path in sorted((HERE / "drawn").glob("*.py")):
        yield f"drawn {path.stem.removeprefix('model_')}", partial(_drawn, path)
    yield from ((f"small {name}", partial(_small, name)) for name in MODELS)
    yield "small cached_llama", _cached_llama


CASES: dict[str, Callable[[], Case]] = dict(_cases())


def guide_blocks() -> list[str]:
    """The guide's Python blocks, in order."""
    return re.findall(r"^```python\n(.*?)^```", GUIDE.read_text(), re.MULTILINE | re.DOTALL)
