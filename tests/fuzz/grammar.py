"""Draw a program from a seed: the same program for the same seed, on every machine."""

import random
from collections.abc import Callable

import torch
from torch import Tensor

from tests.fuzz.drawing import Drawing
from tests.fuzz.elementwise import ELEMENTWISE
from tests.fuzz.movers import MOVERS
from tests.fuzz.products import NORMS, PRODUCTS, RARE_PRODUCTS
from tests.fuzz.program import Dynamic, Input, Program
from tests.fuzz.spatial import POSITIONS, SEVERAL_SIZES
from tests.fuzz.state_control import BLOCKS, CONTROL, WRITES

__all__ = ["BACKENDS", "RECIPES", "draw_program"]

BACKENDS = ("xnnpack", "onnx", "cpu")

RECIPES = {
    "xnnpack": (
        *("int8",) * 8,
        *("int8_dynamic", "int8_dynamic", "int8_minmax", "w8", "a8w4", "w4", "a8w4_g32"),
    ),
    "onnx": (
        *("int8",) * 9,
        *("int8_dynamic", "int8_dynamic", "int8_dynamic_per_tensor", "w8", "a8w4", "w4", "w4_g32"),
        *("a8w4_g32", "lut4", "nf4", "fp8_weight_only", "mxfp4_weight_only", "w3", "w2_g32"),
    ),
    "cpu": (
        *("int8",) * 7,
        *("int8_reduced", "int8_full", "int8_bf16", "int8_dynamic", "int8_dynamic", "a8w4", "w8"),
        *("w4", "w4_g32"),
    ),
}
"""Recipe names by backend; one that is here more often is drawn more often."""

Rule = Callable[[Drawing], str | None]
_FAMILIES: tuple[tuple[dict[Rule, float], float], ...] = (
    (PRODUCTS, 7),
    (RARE_PRODUCTS, 2),
    (NORMS, 1.5),
    (ELEMENTWISE, 7),
    (MOVERS, 5),
    (BLOCKS, 3),
    (POSITIONS, 2.5),
    (SEVERAL_SIZES, 1.5),
    (WRITES, 0.5),
    (CONTROL, 0.25),
)

_LAYOUTS = (
    "{}",
    "{}",
    "{}",
    "{}.transpose(0, -1).contiguous().transpose(0, -1)",
    "torch.cat([{0}, {0}], -1)[..., ::2]",
    "{}.flip(0)",
)


def draw_program(seed: int, backend: str | None = None) -> Program:
    """The program of a seed.

    Args:
        backend: one of BACKENDS; by default the seed's own, in turn.
    """
    for attempt in range(20):
        rng = random.Random(f"{seed}/{attempt}")
        torch.manual_seed(seed)
        program = _drawn(rng, seed, backend or BACKENDS[seed % len(BACKENDS)])
        if program is not None:
            return program
    raise AssertionError(f"no program of seed {seed}")


def _drawn(rng: random.Random, seed: int, backend: str) -> Program | None:
    dtypes = (torch.float32,) * 27 + (torch.float16, torch.bfloat16, torch.float64)
    d = Drawing(rng, rng.choice(dtypes))
    dynamic = _dynamic(rng)
    _draw_inputs(d, dynamic)
    for _ in range(rng.choice((1, 2, 3, 4, 5, 6, 8, 10, 12, 14))):
        _draw_step(d)
    while not any(n.startswith("m") for n in d.attributes):
        if not _draw_step(d, ((PRODUCTS, 1),)):
            return None
    result = _draw_result(d)
    if result is None:
        return None
    program = Program(
        seed=seed,
        backend=backend,
        recipe=rng.choice(RECIPES[backend]),
        inputs=tuple(d.inputs),
        attributes=tuple(d.attributes.items()),
        steps=tuple(d.steps),
        result=result,
        dynamic=dynamic,
        dtype=str(d.dtype),
        strict=rng.random() < 0.8,
        bounded=backend == "xnnpack" and rng.random() < 0.96,
    ).without_unused()
    return program if any(n.startswith("m") for n, _ in program.attributes) else None


def _dynamic(rng: random.Random) -> tuple[Dynamic, ...]:
    found = []
    for name, chance in (("s0", 0.45), ("s1", 0.25)):
        if rng.random() < chance:
            example = rng.choice((2, 3, 4, 5, 6, 8))
            largest = rng.choice((8, 9, 16, 20, 64))
            low = rng.choice((1, 1, 2))
            forms = [f'Dim("{name}", min={low}, max={largest})'] * 3
            forms += ["Dim.AUTO", f'Dim("{name}")', f'Dim("{name}", max={largest})']
            declared = rng.choice(forms)
            others = [min(largest, 16), low, rng.randint(2, largest if largest < 20 else 12)]
            rng.shuffle(others)
            found.append(
                Dynamic(name=name, declared=declared, example=example, others=tuple(others))
            )
    return tuple(found)


def _draw_inputs(d: Drawing, dynamic: tuple[Dynamic, ...]) -> None:
    sizes = [{s.name: s.example for s in dynamic}]
    if dynamic:
        sizes.append({s.name: s.example + 1 for s in dynamic})
    rank = d.choice(2, 2, 2, 3, 3, 3, 4, 4, 4, 4, 5, 1)
    named = {s.name for s in dynamic}
    batch = "s0" if "s0" in named else str(d.choice(1, 1, 2, 2, 3, 4, 5))
    channels = str(d.width())
    shapes = {
        1: [channels],
        2: [batch, channels],
        3: [batch, "s1" if "s1" in named else str(d.choice(1, 3, 4, 5, 6, 8)), channels],
        4: [batch, channels, *_plane(d, 2, named)],
        5: [batch, str(d.choice(1, 2, 3, 4)), *_plane(d, 3, named)],
    }
    shape = shapes[rank]
    if rank == 3 and d.chance(0.4) and "s1" not in named:
        shape = [batch, channels, str(d.choice(5, 8, 9, 12, 14))]
    if d.chance(0.01):
        shape = [*shape[:-1], "0"]
    for index in range(d.choice(1, 1, 1, 2, 2, 3)):
        if index:
            shape = shape if d.chance(0.6) else shape[: d.integer(1, len(shape))]
        kind = d.rng.random()
        text = _floats(d, shape) if not index or kind < 0.6 else _codes(d, shape, kind)
        if not index and kind > 0.93 and rank <= 3:
            text = _codes(d, shape[:2], 0.9)
            shape = shape[:2]
        dims = tuple((at, size) for at, size in enumerate(shape) if size in named)
        last = d.inputs[-1].keyword if d.inputs else False
        d.add_input(
            Input(
                name=f"x{index}",
                text=text,
                dynamic=dims,
                keyword=last or d.chance(0.15),
                nested=d.choice("dict", "tuple") if d.chance(0.1) else "",
            ),
            sizes,
        )


def _plane(d: Drawing, dims: int, named: set[str]) -> list[str]:
    sizes = [str(d.choice(1, 4, 5, 6, 7, 8, 8, 10, 14)) for _ in range(dims)]
    if dims == 3:
        sizes = [str(d.choice(2, 3, 4)) for _ in range(3)]
    if "s1" in named:
        sizes[-1] = "s1"
        if d.chance(0.5):
            sizes[0] = "s1"
    return sizes


def _floats(d: Drawing, shape: list[str]) -> str:
    text = f"torch.{d.choice('randn', 'randn', 'randn', 'rand')}({', '.join(shape)})"
    if d.chance(0.12):
        scale = min(10 ** d.rng.uniform(-6, 6), d.bound / 6)  # 6 deviations are within the dtype
        text = f"({text} * {scale:.1e})"
    elif d.chance(0.08):
        text = f"({text} + {d.choice('5.0', '-3.0', '100.0')})"
    elif d.chance(0.05) and str(shape[-1]) != "0":  # torch fills beyond an empty tensor
        text = f"{text}.index_fill(-1, torch.tensor([0]), {d.choice('0.0', '50.0')})"
    if len(shape) in (4, 5) and d.chance(0.15):
        form = "channels_last" if len(shape) == 4 else "channels_last_3d"
        text = f"{text}.to(memory_format=torch.{form})"
    elif len(shape) > 1 and d.chance(0.25):
        text = d.choice(*_LAYOUTS).format(text)
    return text if d.dtype == torch.float32 else f"{text}.to({d.dtype})"


def _codes(d: Drawing, shape: list[str], kind: float) -> str:
    """Flags or ids."""
    sizes = ", ".join(shape)
    if kind < 0.75:
        return f"(torch.rand({sizes}) > 0.4)"
    dtype = d.choice("", "", "", ", dtype=torch.int32")
    return f"torch.randint(0, 11, ({sizes},){dtype})"


def _draw_step(
    d: Drawing, families: tuple[tuple[dict[Rule, float], float], ...] = _FAMILIES
) -> bool:
    for _ in range(60):
        family = d.rng.choices([f for f, _ in families], [w for _, w in families])[0]
        rule = d.rng.choices(list(family), list(family.values()))[0]
        try:
            text = rule(d)
        except Exception:  # Torch refuses the layer that was drawn: another one.
            text = None
            d.drop_pending()
        if text is not None and d.add(text) is not None:
            return True
        d.drop_pending()
    return False


def _draw_result(d: Drawing) -> str | None:
    values = [s.target for s in d.steps if s.target]
    if not values:
        return None
    last = values[-1]
    more = d.choice(*values)
    value = d.environments[0][last]
    if not (isinstance(value, Tensor) and value.is_floating_point()) and d.chance(0.8):
        floats = [v for v in values if d.environments[0][v].is_floating_point()]
        last = floats[-1] if floats else last
    forms = [last] * 12 + [f"({last}, {more})"] * 2
    forms += [f'{{"a": {last}, "b": {more}}}', f"[{last}, ({more},)]", f"({last}, None)"]
    forms += [f'{{"levels": [{last}, {more}], "last": ({last} * 2, {{"at": {more}}})}}']
    forms += [f"torch.return_types.max(({last}, {more}))", f"list(({last}).unbind(-1)[:2])"]
    forms += [f"({last}, {d.inputs[0].name})", f"({last}, 3)", f"{last}, {last}"]
    return d.choice(*forms)
