"""Operators that a backend does not run, or not as the model computes, and why."""

_EITHER = {
    "argwhere": "as many results as values are not 0, which a step of a scale decides",
    "bucketize": "the gate draws limits, and these are not in order",
    "full_like": "nothing is computed",
    "geqrf": "no kernel",
    "hash_tensor": "no kernel for 64-bit integers without sign",
    "histogram": "no kernel",
    "histogramdd": "no kernel",
    "masked.median": "no kernel for medians without NaN",
    "mode": "no kernel for the places of the values",
    "nanmedian": "no kernel",
    "nextafter": "no kernel",
    "nn.functional.binary_cross_entropy": "torch takes shares between 0 and 1 alone",
    "nn.functional.fractional_max_pool2d": "windows are drawn",
    "nn.functional.fractional_max_pool3d": "windows are drawn",
    "nn.functional.linear_cross_entropy.chunked": "no kernel",
    "nn.functional.linear_cross_entropy.chunked_none": "no kernel",
    "nonzero_static": "no kernel",
    "ones_like": "nothing is computed",
    "ormqr": "no kernel",
    "_segment_reduce.lengths": "no kernel",
    "_segment_reduce.offsets": "no kernel",
    "svd": "some thousand operators, which takes minutes",
    "zeros_like": "nothing is computed",
    "searchsorted": "the gate draws limits, and these are not in order",
    **{f"polygamma.polygamma_n_{order}": "no kernel" for order in range(5)},
}
_TRAINING = dict.fromkeys(
    ("_native_batch_norm_legit", "native_batch_norm"), "statistics of a batch in training"
)
REFUSED: dict[str, dict[str, str]] = {
    "xnnpack": {
        **_EITHER,
        **_TRAINING,
        "_batch_norm_with_update": "statistics of a batch in training",
        "igamma": "no kernel",
        "igammac": "no kernel",
        "masked.norm": "infinities",
        "max_pool2d_with_indices_backward": "ExecuTorch counts places otherwise",
        "nonzero": "as many results as values are not 0, which a step of a scale decides",
        "repeat_interleave": "a size that values decide",
        "scatter_reduce.amax": "places of a part of the tensor",
        "scatter_reduce.amin": "places of a part of the tensor",
        "scatter_reduce.prod": "places of a part of the tensor",
        "unique": "a size that values decide",
        "unique_consecutive": "a size that values decide",
    },
    "onnx": {
        **_EITHER,
        **_TRAINING,
        "unique_consecutive": "a size that values decide",
        "chalf": "no 16-bit complex numbers",
        "nn.functional.scaled_dot_product_attention": "heads that three dimensions share",
    },
}
"""By backend and operator of `samples.names`."""
