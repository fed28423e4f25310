"""Provenance inside the file: packed small, read back equal."""

import numpy as np
import pytest
import torch
from torch import nn

from pt2e_quant.backends.onnx.metadata import Metadata
from pt2e_quant.core.errors import ArtifactError
from pt2e_quant.core.provenance import Provenance, TensorRecord
from pt2e_quant.core.read_capture import rebuild_capture
from pt2e_quant.core.schemes import Role
from pt2e_quant.flow.report.report import Report

SCALES = np.random.default_rng(0).uniform(0, 1, 500).astype(np.float32).tolist()


def table() -> Provenance:
    return Provenance(
        quantizer="q",
        tensors=[
            TensorRecord(name="x", role=Role.INPUT, scale=[SCALES[0]], zero_point=[3]),
            TensorRecord(name="w", role=Role.WEIGHT, scale=SCALES, zero_point=[0] * 500),
            TensorRecord(name="b", role=Role.BIAS, scale=SCALES[:7], zero_point=[0, 1] * 3 + [0]),
        ],
        notes=["one"],
    )


@pytest.fixture(scope="module")
def capture():
    program = torch.export.export(nn.ReLU(), (torch.zeros(1),))
    return rebuild_capture(program.module())


def metadata(capture) -> Metadata:
    return Metadata(
        capture=capture, results=(), report=Report(backend="ONNX Runtime", provenance=table())
    )


def unread(name: str) -> list[float]:
    raise AssertionError(name)


def test_properties_when_constants_hold_the_scales_then_they_are_read_from_there(capture):
    properties = metadata(capture).to_properties(["w_scale", "x"])
    asked = []

    def read(name: str) -> list[float]:
        asked.append(name)
        return SCALES

    assert Metadata.from_properties(properties, "m.onnx", read).provenance == table()
    assert asked == ["w_scale"]
    assert sum(map(len, properties.values())) < 1500


def test_properties_when_no_constant_holds_them_then_they_are_written_exactly(capture):
    properties = metadata(capture).to_properties([])
    assert Metadata.from_properties(properties, "m.onnx", unread).provenance == table()


@pytest.mark.parametrize("text", ["", "not base85 ~~", "abc"])
def test_properties_when_the_record_is_damaged_then_error_says_so(capture, text):
    properties = metadata(capture).to_properties([]) | {"pt2e_quant.record": text}
    with pytest.raises(ArtifactError, match="damaged"):
        Metadata.from_properties(properties, "m.onnx", unread)
