"""Figures in a file of fixed length: written, read again, the checksum fits."""

import math

import pytest

from pt2e_quant.core.checksum import BLANK, check_sum, renew_sum, write_sum
from pt2e_quant.core.errors import ArtifactError
from pt2e_quant.core.stored_figures import NO_FIGURES, read_figures, write_figures

FILE = b"before" + (NO_FIGURES + BLANK).encode() + b"after"


@pytest.mark.parametrize(
    "figures",
    [[47.9681, 144.5], [None, 3.25], [-719.023, None], [math.inf, -math.inf], [1e-300, 0.0]],
)
def test_figures_when_written_then_read_again_and_the_checksum_fits(figures):
    made = write_figures(write_sum(FILE), figures)
    with pytest.raises(ArtifactError, match="checksum"):
        check_sum(made, "file")
    made = renew_sum(made)
    check_sum(made, "file")
    assert len(made) == len(FILE)
    assert read_figures(made) == figures


def test_figures_when_none_were_written_then_not_known():
    assert read_figures(FILE) == read_figures(b"another file") == [None, None]


def test_figures_when_the_file_has_no_place_then_refused():
    with pytest.raises(ValueError, match="one place"):
        write_figures(b"another file", [1.0, 2.0])
