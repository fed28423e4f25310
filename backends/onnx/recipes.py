"""Recipes of the ONNX backend: a name, and the schemes, observers and passes it stands for."""

import re
from dataclasses import replace
from functools import partial

from torch.fx import Node

from pt2e_quant.backends.onnx.code_rows import WEIGHT_FORMATS
from pt2e_quant.backends.onnx.low_bit_rows import GROUP_SIZES
from pt2e_quant.backends.onnx.passes.shuffle_upsampling import shuffle_upsampling
from pt2e_quant.backends.onnx.policy import POLICY
from pt2e_quant.backends.target.policy import place_integer_regions
from pt2e_quant.backends.target.recipe import (
    CHOICES_BY_DATA,
    FIT_PAIRS,
    WEIGHTS_BY_DATA,
    Recipe,
    RecipeFamily,
    Recipes,
    tables_of,
    without_data,
)
from pt2e_quant.core.scheme_names import scheme_named
from pt2e_quant.core.schemes import (
    BIAS_INT32,
    INT8_WEIGHT,
    INT8_WEIGHT_ROWS,
    UINT8_ACTIVATION,
    Scheme,
)
from pt2e_quant.flow.annotate.observer_choice import ObserverChoice
from pt2e_quant.flow.annotate.rules import QuantRule, RuleKind
from pt2e_quant.graph.ops import CONV_TRANSPOSE, is_call
from pt2e_quant.graph.tied_tables import (
    is_tied_embedding,
    is_tied_linear,
    is_untied_embedding,
)
from pt2e_quant.observers.static.predicted_range import PredictedRangeObserver
from pt2e_quant.observers.weights.weight_search import WeightSearch
from pt2e_quant.passes.algorithms.own_ranges import OwnRanges
from pt2e_quant.passes.algorithms.run_time_scales import RunTimeScales
from pt2e_quant.passes.algorithms.smooth_quant import SmoothQuant
from pt2e_quant.passes.attention.decompose_attention import decompose_attention
from pt2e_quant.passes.batch_norm.affines_as_convs import affines_as_convs
from pt2e_quant.passes.cleanup.activate_before_moves import activate_before_moves
from pt2e_quant.passes.cleanup.einsums_as_products import einsums_as_products
from pt2e_quant.passes.cleanup.join_and_split import split_as_slices
from pt2e_quant.passes.cleanup.linear_forms import products_as_linears
from pt2e_quant.passes.cleanup.remove_identities import remove_noop_expand

INT8 = Scheme(
    name="int8",
    input=UINT8_ACTIVATION,
    output=UINT8_ACTIVATION,
    weight=INT8_WEIGHT,
    bias=BIAS_INT32,
)
"""uint8 activations: ONNX Runtime on x86 runs them about five times faster than int8 ones."""

_EMBEDDING_ROWS = Scheme(name="w8", input=None, output=None, weight=INT8_WEIGHT_ROWS)
_ATTENTION = (decompose_attention, einsums_as_products, remove_noop_expand)


_TABLES = (
    QuantRule(kind=RuleKind.GLOBAL, scheme=_EMBEDDING_ROWS, where=is_untied_embedding),
    QuantRule(kind=RuleKind.GLOBAL, scheme=scheme_named("w8"), where=is_tied_embedding),
)
"""Embedding tables get int8 rows, which cost a tenth of what 4-bit ones do in error."""


def is_transposed(node: Node) -> bool:
    """True if a node is a transposed convolution."""
    return is_call(node, CONV_TRANSPOSE)


_TRANSPOSED = QuantRule(kind=RuleKind.GLOBAL, scheme=scheme_named("w8"), where=is_transposed)
"""Those that no integer form makes faster stay float: their weights are int8 in the file."""


def _scheme(name: str) -> Scheme:
    # MatMulNBits takes 4 bits with a zero point at no cost.
    return scheme_named(name, symmetric=re.fullmatch(r"(a8)?w4(_g\d+)?", name) is None)


_without_data = partial(
    without_data,
    scheme_of=_scheme,
    embeddings=_TABLES,
    search=WeightSearch.MSE,
    transforms=(*_ATTENTION, products_as_linears),
)


def _dynamic(name: str, text: str) -> Recipe:
    """Activations of 8 bits whose scales are found at run time."""
    made = _without_data(name, text)
    return replace(made, algorithms=(*FIT_PAIRS, *made.algorithms))


def _sixteen_bit(name: str, text: str) -> Recipe:
    """Static 16-bit activations everywhere: no operator is kept float for its speed.

    With 32768 steps on each side of 0 a residual stream or a softmax loses nothing to rounding.
    """
    scheme = scheme_named(name)
    head = QuantRule(kind=RuleKind.GLOBAL, scheme=scheme_named("a16w8"), where=is_tied_linear)
    is_small = scheme.weight is not None and scheme.weight.bits < 8
    return Recipe(
        name=name,
        text=text,
        scheme=scheme,
        observers=ObserverChoice(
            activation=PredictedRangeObserver,
            search=WeightSearch.MSE if is_small else WeightSearch.MIN_MAX,
        ),
        rules=(*tables_of(_TABLES, scheme), head),
        transforms=(*_ATTENTION, products_as_linears, split_as_slices),
        algorithms=WEIGHTS_BY_DATA,
    )


_GROUPS = f"[_g<{','.join(map(str, GROUP_SIZES))}>]"

RECIPES = Recipes(
    "ONNX Runtime",
    (
        Recipe(
            name="int8",
            text="static: uint8 activations per tensor, int8 weights per output channel; exact "
            "sums on any CPU",
            scheme=INT8,
            observers=ObserverChoice(activation=PredictedRangeObserver),
            rules=(_TRANSPOSED,),
            transforms=(
                *_ATTENTION,
                products_as_linears,
                split_as_slices,
                shuffle_upsampling,
                activate_before_moves,
                place_integer_regions(POLICY),
                affines_as_convs,
            ),
            algorithms=(
                *FIT_PAIRS,
                RunTimeScales(pooled_only=True),
                SmoothQuant(),
                OwnRanges(),
                *CHOICES_BY_DATA,
            ),
        ),
        RecipeFamily(
            grammar="a16w<4,8>",
            text="static: int16 activations per tensor with zero point 0 at every operator, int8 "
            "or int4 weights per output channel, float biases: q/dq for devices with 16-bit "
            "integers, which ONNX Runtime's CPU provider computes in float",
            make=_sixteen_bit,
        ),
        _dynamic(
            "int8_dynamic",
            "linears: int8 activations per token at run time, int8 weights per output channel",
        ),
        _dynamic(
            "int8_dynamic_per_tensor",
            "linears: uint8 activations per tensor at run time (ONNX Runtime's own dynamic "
            "scheme, the fastest), int8 weights per output channel",
        ),
        RecipeFamily(
            grammar=f"a8w4{_GROUPS}",
            text="uint4 weights per output channel or in groups, least squared error; int8 "
            "embeddings; activations rounded to int8 at run time, inside the kernel",
            make=_without_data,
        ),
        RecipeFamily(
            grammar=f"w<2..8>{_GROUPS}",
            text="weights of so many bits per output channel or in groups, least squared error; "
            "int8 embeddings; computed in float32: 4 bits by a kernel that decodes them (uint4), "
            "others decoded once at load",
            make=_without_data,
        ),
        RecipeFamily(
            grammar="<format>",
            text="weights in a small float or a code book by their scheme's name (nf4, …: see "
            "docs/schemes.md), decoded once at load; int8 embeddings; computed in float32",
            make=_without_data,
            names=WEIGHT_FORMATS,
        ),
    ),
)
