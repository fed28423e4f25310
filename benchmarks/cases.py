"""The models that the benchmarks compare on, each with its calibration and held-out inputs."""

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn

from benchmarks import models
from benchmarks.inputs import image_batches

Batches = list[tuple[Tensor, ...]]
CALIBRATION_SEED, HELD_OUT_SEED = 11, 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A float model in eval mode and its data, batch 1."""

    name: str
    model: nn.Module
    calibration: Batches
    held_out: Batches
    is_transformer: bool = False

    @property
    def example(self) -> tuple[Tensor, ...]:
        """The input to export with and to time."""
        return self.calibration[0]


def image_case(
    name: str, build: Callable[..., nn.Module], *, image: int, is_transformer: bool = False
) -> Case:
    """Return a seeded image model with 8 calibration and 16 held-out 1/f-noise images."""
    return Case(
        name=name,
        model=build(image=image),
        calibration=[*image_batches(8, image, CALIBRATION_SEED)],
        held_out=[*image_batches(16, image, HELD_OUT_SEED)],
        is_transformer=is_transformer,
    )


def digits_case(image: int) -> Case:
    """Return the trained CNN of the quickstart; digits are 8x8, `image` is not used."""
    del image
    sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))
    from digits_cnn import load_images, train_cnn

    digits = load_images()
    return Case(
        name="digits",
        model=train_cnn(digits.train_images, digits.train_labels, epochs=12),
        calibration=[(x,) for x in digits.train_images[:200].split(1)],
        held_out=[(x,) for x in digits.test_images.split(1)],
    )


def minilm_case(image: int) -> Case:
    """Return trained MiniLM on docstring sentences, 64 tokens; `image` is not used."""
    del image
    from benchmarks.text_models import minilm, sentence_batches

    batches = [*sentence_batches(40, tokens=64, seed=0)]
    return Case(
        name="minilm",
        model=minilm(),
        calibration=[*batches[:16]],
        held_out=[*batches[16:]],
        is_transformer=True,
    )


def llama_case(image: int) -> Case:
    """Return a small random Llama (4 layers of 512) on 64 tokens; `image` is not used."""
    del image
    from benchmarks.text_models import llama, token_batches

    return Case(
        name="llama",
        model=llama(layers=4, width=512),
        calibration=[(ids,) for ids, _ in token_batches(8, 64, 1024, CALIBRATION_SEED)],
        held_out=[(ids,) for ids, _ in token_batches(16, 64, 1024, HELD_OUT_SEED)],
        is_transformer=True,
    )


CASES: dict[str, Callable[..., Case]] = {
    "digits": digits_case,
    "resnet18": functools.partial(image_case, "resnet18", models.resnet18),
    "resnet50": functools.partial(image_case, "resnet50", models.resnet50),
    "mobilenet_v2": functools.partial(image_case, "mobilenet_v2", models.mobilenet_v2),
    "vit_small": functools.partial(image_case, "vit_small", models.vit_small, is_transformer=True),
    "minilm": minilm_case,
}
