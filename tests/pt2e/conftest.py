"""Makes the helper modules importable (tests are no package), and XNNPACKQuantizer bearable."""

import copy
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parent))


@pytest.fixture(scope="session")
def cached_patterns():
    """XNNPACKQuantizer exports twelve patterns at each call, ten seconds' worth: once is enough."""
    module = pytest.importorskip("executorch.backends.xnnpack.quantizer.xnnpack_quantizer_utils")
    made = {}
    export = module._get_aten_graph_module_for_pattern

    def export_once(pattern, example_inputs, is_cuda):
        cells = [cell.cell_contents for cell in pattern.fn.__closure__]
        key = tuple(getattr(c, "__name__", c) for c in cells), example_inputs[0].shape, is_cuda
        if key not in made:
            made[key] = export(pattern, example_inputs, is_cuda)
        return copy.deepcopy(made[key])  # the matcher edits it

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_get_aten_graph_module_for_pattern", export_once)
        yield
