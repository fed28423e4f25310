"""A mark for tests of what oneDNN multiplies exactly with VNNI alone."""

import pytest

from pt2e_quant.kernels.onednn.exact_products import onednn_is_exact

NEEDS_VNNI = pytest.mark.skipif(not onednn_is_exact(), reason="oneDNN saturates here (no VNNI)")
