"""Mark the layers of a spectrum whose logarithm is taken, for the policies of backends."""

from torch.fx import GraphModule

from pt2e_quant.graph.idioms.spectra import SPECTRUM_KEY, spectral_layers
from pt2e_quant.graph.pipeline import PassResult, graph_pass


@graph_pass(needs=(), gives=())
def mark_spectra(gm: GraphModule) -> PassResult:
    """Set `SPECTRUM_KEY` for the layers of a signal's transform in front of a logarithm.

    Before:  log(clamp(square(conv1d(x, filters)), min=1e-10))
    After:   the same, the convolution marked
    """
    for node in spectral_layers(gm.graph):
        node.meta[SPECTRUM_KEY] = True
    return PassResult(changed=False)
