"""A sample of an operator quantized, lowered and called."""

import warnings
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import pt2e_quant as pq
from pt2e_quant.core.errors import ArtifactError, CalibrationError, Pt2eQuantError
from tests.operators.samples import Sample, samples

__all__ = ["run_operator"]


def run_operator(name: str, backend: str, count: int) -> list[str]:
    """What came of each sample: "ok", "invalid", "refused: …" or "wrong: …".

    `Backend.lower` holds the artifact against the q/dq graph; here its results have the structure,
    the dtypes and the shapes of the model's.
    """
    return [_outcome(sample, backend) for sample in samples(name, count)]


def _outcome(sample: Sample, backend: str) -> str:
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = torch.export.export(sample.model, sample.inputs)
            expected = sample.model(*sample.inputs)
    except Exception as error:  # torch's
        return f"invalid: {type(error).__name__}"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            artifact = pq.quantize(
                program,
                calibration_data=[sample.inputs, *sample.batches(2)],
                backend=backend,
                effort="fast",
                progress=False,
            )
        found = [artifact.run(*sample.inputs) for _ in range(2)]
    except CalibrationError:  # the sample's own values, outside of what the operator is defined on
        return "invalid: not finite"
    except ArtifactError as error:
        return f"wrong: {str(error)[:300]}"
    except Pt2eQuantError as error:
        return f"refused: {type(error).__name__}: {error.what[:200]}"
    complaints = [_complaint(expected, one) for one in found]
    return next((f"wrong: {c}" for c in complaints if c), "ok")


def _complaint(expected: Any, found: Any) -> str:
    wanted, given = (pytree.tree_leaves(v) for v in (expected, found))
    if len(wanted) != len(given):
        return f"{len(given)} results, expected {len(wanted)}"
    for left, right in zip(wanted, given, strict=True):
        if isinstance(left, Tensor) and (left.shape, left.dtype) != (right.shape, right.dtype):
            return f"{right.dtype} {[*right.shape]}, expected {left.dtype} {[*left.shape]}"
    return ""
