"""A canonical graph's weights, loaded back into the eager module that it was exported from."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from pt2e_quant.core.arguments import check_module, check_type
from pt2e_quant.core.dtypes import info
from pt2e_quant.core.errors import ConfigError
from pt2e_quant.core.formats.block_qparams import BlockQParams, KeptScale
from pt2e_quant.core.formats.blocks import WHOLE
from pt2e_quant.core.formats.format_ops import is_choose_scales
from pt2e_quant.core.formats.number_formats import (
    BINARY,
    NF4,
    CodeBook,
    NumberFormat,
    float_format,
)
from pt2e_quant.core.formats.scale_format import FLOAT32_SCALES, ScaleFormat
from pt2e_quant.core.granularity import (
    Granularity,
    PerBlock,
    PerChannel,
    PerGroup,
    PerTensor,
    PerToken,
)
from pt2e_quant.core.qdq import (
    STATIC_KINDS,
    QdqKind,
    float_name,
    is_dequantize,
    kind_of_qdq,
    read_qparams,
)
from pt2e_quant.core.qparams import QParams
from pt2e_quant.core.schemes import TensorScheme
from pt2e_quant.core.unpack_op import is_unpack, unpacked_dtype
from pt2e_quant.flow.prepare.prepared import FOLDED_KEY, REWRITTEN_KEY
from pt2e_quant.graph import ops
from pt2e_quant.graph.meta import attribute, constant_of
from pt2e_quant.graph.ops import is_call
from pt2e_quant.passes.cleanup.contractions import ROWS
from pt2e_quant.tensors.form import TensorForm
from pt2e_quant.tensors.graphs.graph import turned
from pt2e_quant.tensors.quantized_tensor import QuantizedTensor

_ACTIVATION_KINDS: dict[QdqKind | None, Granularity] = {
    QdqKind.PER_TOKEN: PerToken(),
    QdqKind.PER_TENSOR_DYNAMIC: PerTensor(),
}


def load_graph(module: nn.Module, gm: GraphModule) -> list[str]:
    """Give a module the weights of a canonical graph: codes, scales, and changed float ones.

    Args:
        module: the one that the graph was exported from, or an equal one.
        gm: of convert_pt2e.

    Returns:
        The names of the parameters that are quantized now.

    Raises:
        ConfigError: the graph has a quantized weight that the module has no parameter for, or has
            folded a batch norm or factor into a weight, which the module would apply once more.
    """
    check_module("module", module)
    check_type("gm", gm, GraphModule, "a graph of convert_pt2e", fix="load_graph(module, graph)")
    parameters = dict(module.named_parameters(remove_duplicate=False))
    _refuse_folded(gm, parameters)
    found: dict[str, QuantizedTensor] = {}
    for node in gm.graph.nodes:
        if not is_dequantize(node):
            continue
        source = _constant_source(node)
        if source is None:
            continue
        name = float_name(source)
        is_turned = name not in parameters and name.removesuffix(ROWS) in parameters
        name = name.removesuffix(ROWS) if is_turned else name
        if name not in parameters:
            raise ConfigError(
                f'the graph quantizes "{name}", which is no parameter of this module',
                fix="load it into the module that was exported",
            )
        if name not in found:
            tensor = _tensor_of(gm, node, source)
            found[name] = turned(tensor) if is_turned else tensor
    _set_all(module, parameters, found)
    _load_floats(gm, parameters, found)
    return sorted(found)


def _refuse_folded(gm: GraphModule, parameters: dict[str, nn.Parameter]) -> None:
    """Refuse a graph whose weights have taken in what the module still applies to them."""
    rewritten = sorted(set(gm.meta.get(REWRITTEN_KEY, ())) & parameters.keys())
    if not rewritten:
        return
    folded = sorted(set(gm.meta.get(FOLDED_KEY, ())) & parameters.keys())
    read = {id(parameters[n]) for n in _names_read(gm) if n in parameters}
    lost = [name for name in folded if id(parameters[name]) not in read]
    what = f'"{lost[0]}"' if lost else "what the module computes of it"
    raise ConfigError(
        f'the graph has folded {what} into "{rewritten[0]}", and this module would apply it once '
        "more",
        fix="fold it in the module before the export "
        "(torch.nn.utils.fusion.fuse_conv_bn_eval), or quantize_(…, algorithms=[…]) instead",
    )


def _names_read(gm: GraphModule) -> set[str]:
    return {float_name(node) for node in gm.graph.nodes if node.op == "get_attr"}


def quantized_names(gm: GraphModule) -> set[str]:
    """The names, in the float module, of the weights that a canonical graph has quantized."""
    sources = (_constant_source(node) for node in gm.graph.nodes if is_dequantize(node))
    return {float_name(source) for source in sources if source is not None}


def _set_all(
    module: nn.Module, parameters: dict[str, nn.Parameter], found: dict[str, QuantizedTensor]
) -> None:
    """Put tensors in the places of parameters, of tied ones in all."""
    by_old = {id(parameters[name]): tensor for name, tensor in found.items()}
    made = {key: nn.Parameter(t, requires_grad=False) for key, t in by_old.items()}
    for name, old in parameters.items():
        if id(old) in made:
            owner, _, leaf = name.rpartition(".")
            module.get_submodule(owner)._parameters[leaf] = made[id(old)]


def _load_floats(
    gm: GraphModule, parameters: dict[str, nn.Parameter], found: dict[str, QuantizedTensor]
) -> None:
    for node in gm.graph.nodes:
        name = str(node.target)
        if node.op != "get_attr" or name not in parameters or name in found:
            continue
        value = attribute(gm, name)
        own = parameters[name]
        if isinstance(value, Tensor) and value.shape == own.shape and not torch.equal(value, own):
            own.data = value.detach().to(own.dtype)


def _constant_source(node: Node) -> Node | None:
    """The get_attr node of the codes that a dequantize reads; None of activations."""
    source = node.args[0]
    if isinstance(source, Node) and is_unpack(source):
        source = source.args[0]
    return source if isinstance(source, Node) and source.op == "get_attr" else None


def _tensor_of(gm: GraphModule, node: Node, source: Node) -> QuantizedTensor:
    codes_node = node.args[0]
    assert isinstance(codes_node, Node)
    codes = constant_of(gm, codes_node)
    assert codes is not None  # it is read from an attribute
    dtype = unpacked_dtype(codes_node) if is_unpack(codes_node) else None
    kind = kind_of_qdq(node)
    qparams: QParams | BlockQParams
    if kind in STATIC_KINDS:
        qparams = read_qparams(gm, node)
        scheme = _plain_scheme(qparams, dtype or qparams.dtype)
    else:
        qparams = _block_qparams(gm, node, codes, dtype)
        scheme = qparams.scheme
    value: Tensor = node.meta["val"]
    form = TensorForm(
        scheme=scheme, dtype=value.dtype, shape=tuple(codes.shape), input=_input_of(node)
    )
    made = QuantizedTensor.from_qparams(codes.detach(), qparams, form)
    static = _static_input(gm, node)
    if static is None:
        return made
    own = {"input_scale": static.scale, "input_zero_point": static.zero_point}
    scheme = _plain_scheme(static, static.dtype)
    return made.like(made.parts | own, replace(made.form, input=scheme))


def _static_input(gm: GraphModule, node: Node) -> QParams | None:
    """The qparams of static activations that a product multiplies with a weight."""
    for user in node.users:
        x = user.args[0] if is_call(user, ops.LINEAR + ops.CONV) else None
        if isinstance(x, Node) and is_dequantize(x) and kind_of_qdq(x) in STATIC_KINDS:
            return read_qparams(gm, x)
    return None


def _plain_scheme(qparams: QParams, dtype: torch.dtype) -> TensorScheme:
    granularity: Granularity = PerTensor()
    if qparams.group_size is not None:
        granularity = PerGroup(qparams.group_size)
    elif qparams.axis is not None:
        granularity = PerChannel(qparams.axis)
    row = info(dtype)
    return TensorScheme(
        dtype=dtype,
        granularity=granularity,
        symmetric=row.signed and not bool(qparams.zero_point.any()),
        quant_min=None if qparams.quant_min == row.quant_min else qparams.quant_min,
        quant_max=None if qparams.quant_max == row.quant_max else qparams.quant_max,
    )


def _block_qparams(
    gm: GraphModule, node: Node, codes: Tensor, dtype: torch.dtype | None
) -> BlockQParams:
    """The qparams of our own operators, see `core.formats.format_ops` for their arguments."""

    def held(value: Any) -> Tensor | None:
        return constant_of(gm, value) if isinstance(value, Node) else None

    args: tuple[Any, ...] = node.args  # of the types that the schemas say
    kind, block = kind_of_qdq(node), tuple(args[3])
    granularity = _granularity(block)
    zero: Tensor | None = None
    table: Tensor | None = None
    form: NumberFormat | None = None
    whole: Tensor | None = None
    if kind is QdqKind.CODE_BOOK:
        table, scale = held(args[1]), held(args[2])
        assert table is not None
        form = _book_of(table, dtype)
    elif kind is QdqKind.FLOAT:
        scale, whole = held(args[1]), held(args[2])
        form = float_format(str(args[4]))
    else:
        scale, zero = held(args[1]), held(args[2])
    kept = None if scale is None else KeptScale(values=scale, tensor_scale=whole)
    scales = FLOAT32_SCALES
    of_scales = table if scale is None else scale
    if of_scales is not None:
        scales = ScaleFormat(dtype=of_scales.dtype, in_tensor_units=whole is not None)
    limits = (None, None) if form is not None else (int(args[4]), int(args[5]))
    scheme = TensorScheme(
        dtype=dtype or (codes.dtype if form is None else form.code_dtype),
        granularity=granularity,
        symmetric=zero is None,
        format=form,
        scales=scales,
        quant_min=limits[0],
        quant_max=limits[1],
    )
    zero = None if zero is None else zero.to(torch.int32)
    return BlockQParams(scheme=scheme, block=block, scale=kept, zero_point=zero, table=table)


def _granularity(block: tuple[int, ...]) -> Granularity:
    if all(length == WHOLE for length in block):
        return PerTensor()
    ones = [axis for axis, length in enumerate(block) if length == 1]
    if len(ones) == 1 and all(n == WHOLE for a, n in enumerate(block) if a != ones[0]):
        return PerChannel(ones[0])
    others = [axis for axis, length in enumerate(block) if length not in (1, WHOLE)]
    if len(others) == 1 and len(ones) == len(block) - 1:
        axis = others[0]
        return PerGroup(block[axis], -1 if axis == len(block) - 1 else axis)
    return PerBlock(block)


def _book_of(table: Tensor, dtype: torch.dtype | None) -> CodeBook:
    bits = info(dtype).bits if dtype is not None else 8
    for known in (NF4, BINARY):
        if table.dim() == 1 and torch.equal(table, known.table()):
            return known
    return CodeBook(name=f"lut{bits}", bits=bits)


def _input_of(node: Node) -> TensorScheme | None:
    """Return the scheme of the activations that a product multiplies with a weight."""
    for user in node.users:
        x = user.args[0] if is_call(user, ops.LINEAR + ops.CONV) else None
        if not isinstance(x, Node) or not is_dequantize(x):
            continue
        if (kind := kind_of_qdq(x)) in _ACTIVATION_KINDS:
            return _dynamic_integers(x, _ACTIVATION_KINDS[kind])
        if kind is QdqKind.FLOAT:
            return _dynamic_floats(x)
    return None


def _dynamic_integers(node: Node, granularity: Granularity) -> TensorScheme:
    args: tuple[Any, ...] = node.args
    row = info(args[5])
    chooser = str(args[1].args[0].target)
    return TensorScheme(
        dtype=row.dtype,
        granularity=granularity,
        symmetric="symmetric" in chooser and "asymmetric" not in chooser,
        quant_min=None if args[3] == row.quant_min else int(args[3]),
        quant_max=None if args[4] == row.quant_max else int(args[4]),
        is_dynamic=True,
    )


def _dynamic_floats(node: Node) -> TensorScheme | None:
    args: tuple[Any, ...] = node.args
    if not is_choose_scales(args[1]):
        return None  # static
    form, block = float_format(str(args[4])), tuple(args[3])
    by_token = all(n == 1 for n in block[:-1]) and block[-1] == WHOLE
    kept = args[1].meta["val"].dtype
    return TensorScheme(
        dtype=form.code_dtype,
        granularity=PerToken() if by_token else _granularity(block),
        symmetric=True,
        is_dynamic=True,
        format=form,
        scales=ScaleFormat(dtype=kept, in_tensor_units=args[2] is not None),
    )
