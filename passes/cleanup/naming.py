"""The passes that call by its operator what a model writes out, and that mark what they find.

In the order they run in.
"""

from pt2e_quant.graph.pipeline import GraphPass
from pt2e_quant.passes.cleanup.mark_spectra import mark_spectra
from pt2e_quant.passes.cleanup.replace_aliases import replace_aliases
from pt2e_quant.passes.cleanup.written_activations import name_activations
from pt2e_quant.passes.cleanup.written_norms import name_norms
from pt2e_quant.passes.cleanup.written_reductions import name_reductions
from pt2e_quant.passes.cleanup.written_resizes import name_resizes

NAMING_PASSES: tuple[GraphPass, ...] = (
    replace_aliases,
    name_activations,
    name_norms,
    name_reductions,
    name_resizes,
    mark_spectra,
)
