"""Provenance inside the file: packed small, read back equal."""

import numpy as np
import pytest

from pt2e_quant.backends.onnx.metadata import pack_provenance, unpack_provenance
from pt2e_quant.core.errors import ArtifactError
from pt2e_quant.core.provenance import Provenance, TensorRecord
from pt2e_quant.core.schemes import Role

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


def test_pack_when_constants_hold_the_scales_then_they_are_read_from_there() -> None:
    text = pack_provenance(table(), ["w_scale", "x"])
    asked = []

    def read(name: str) -> list[float]:
        asked.append(name)
        return SCALES

    assert unpack_provenance(text, read) == table()
    assert asked == ["w_scale"]
    assert len(text) < 1000


def test_pack_when_no_constant_holds_them_then_they_are_written_exactly() -> None:
    def read(name: str) -> list[float]:
        raise AssertionError(name)

    assert unpack_provenance(pack_provenance(table(), []), read) == table()


@pytest.mark.parametrize("text", ["", "not base85 ~~", "abc"])
def test_unpack_when_text_is_damaged_then_error_says_so(text: str) -> None:
    with pytest.raises(ArtifactError, match="damaged"):
        unpack_provenance(text, lambda _: [])
